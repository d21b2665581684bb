"""Reads a result back, with a message for every kind of file that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from preft_cli.bench.results import SCHEMA_VERSION, BenchResult
from preft_cli.errors import UserError


def load_result(path: Path) -> BenchResult:
    """The result in the file that `preft bench` wrote at `path`.

    Raises:
        UserError: there is no such file, or it holds something else. Exit code 2.
    """
    document = _read(path)
    if not isinstance(document, dict) or "schema_version" not in document:
        raise UserError(f"{path} is no result of preft bench: it has no schema_version", 2)
    version = document["schema_version"]
    if "points" in document and "arms" not in document:
        raise UserError(
            f"{path} is the summary of a sweep; the result of each value lies in {path.with_suffix('')}/", 2
        )
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema version {version!r}; this preft reads version {SCHEMA_VERSION}: measure again", 2
        )
    try:
        result = BenchResult.model_validate(document)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is no result of preft bench: {where}: {first['msg']}", 2) from None
    return result.model_copy(update={"path": path})


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; preft bench --out {path} writes one", 2) from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; give the JSON file of a result", 2) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", 2) from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON; give the file that preft bench wrote", 2) from None
