"""Rows of a data set on the Hugging Face Hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from preft_cli.console import progress
from preft_cli.data.parquet import as_record
from preft_cli.errors import UserError


def hub_records(repo_id: str, path: Path, setting: str, split: str) -> Iterator[tuple[str, Any]]:
    """`owner/name:row N` and each row of the split as a record; fetched once into the Hub's cache.

    Args:
        path: where a file of that name would lie, for the error.
        split: its name, or `configuration/split` of a data set that has several configurations.

    Raises:
        UserError: no such data set or split, or no connection and no copy in the cache.
    """
    # The Hub's library reports usage unless told otherwise, and reads this when it is first imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import datasets

    configuration, _, name = split.rpartition("/")
    with progress(f"fetching {repo_id} ({split})"):
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity_error()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every attempt
        try:
            rows = datasets.load_dataset(repo_id, *filter(None, [configuration]), split=name)
        except Exception as error:
            # Of many kinds: network, login, unknown names, files of every form that the data set may be made of.
            # The Hub's library lists the configurations on the lines behind the first.
            lines = str(error).splitlines() or [type(error).__name__]
            reason = " ".join(lines[:2] if lines[0].startswith("Config name is missing") else lines[:1]).rstrip(".")
            raise UserError(
                f"{setting}: {repo_id} is no file ({path} does not exist), and its split {split} cannot be had from the "
                f"Hub: {reason}. Check the name and {setting.replace('file', 'split')} (split, or configuration/split); connect "
                "to the network; log in with `hf auth login` if it is private or gated; or fetch it elsewhere and give the "
                "path of a .jsonl or .parquet file."
            ) from error
    for number in range(len(rows)):
        where = f"{repo_id}:row {number + 1}"
        try:
            row = rows[number]
        except Exception as error:  # a column of images or sound whose files do not decode
            reason = str(error).partition("\n")[0]
            raise UserError(f"{setting}: {where} cannot be read: {type(error).__name__}: {reason}") from error
        yield where, as_record(row)
