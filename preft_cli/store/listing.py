"""All adapters of a store, from their headers alone. No torch here, and nothing but one header and one stat a file."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from engine_patch.errors import PreftError
from engine_patch.store import Header, read_header, scan_store
from preft_cli.reasons import without_path
from preft_cli.store.results import BrokenFile, StoreList, StoreRow

Sort = Literal["name", "size", "when", "rank"]

_KEYS: dict[Sort, Callable[[StoreRow], Any]] = {
    "name": lambda row: row.name,
    "size": lambda row: (-row.bytes, row.name),
    "when": lambda row: row.modified,
    "rank": lambda row: (-row.rank, row.name),
}


def list_adapters(store: Path, sort: Sort = "name") -> StoreList:
    """Every adapter of the folder `store`; largest or newest first where that is asked for.

    Files that cannot be used are in `broken`, each with its reason.

    Raises:
        PreftError: the folder cannot be read.
    """
    listing = scan_store(store)
    broken = [BrokenFile(path=str(path), reason=without_path(path, reason)) for path, reason in listing.rejected]
    rows = []
    with _no_garbage_collection():
        for name, path in listing.files.items():
            try:
                rows.append(StoreRow(**facts(name, read_header(path), path)))
            except PreftError as error:
                broken.append(BrokenFile(path=str(path), reason=without_path(path, str(error))))
            except OSError as error:  # removed in the meantime
                broken.append(BrokenFile(path=str(path), reason=f"cannot read it: {error.strerror}"))
    rows.sort(key=_KEYS[sort], reverse=sort == "when")
    broken.sort(key=lambda file: file.path)
    return StoreList(store=str(store), adapters=rows, broken=broken)


def facts(name: str, header: Header, path: Path | str) -> dict[str, Any]:
    """The fields of a `StoreRow`.

    Raises:
        OSError: the file is gone.
    """
    stat = os.stat(path)  # noqa: PTH116
    return {
        "name": name,
        "method": header.method,
        "rank": header.rank,
        "dtype": header.dtype,
        "bytes": stat.st_size,
        "base": _base(header),
        "digest": header.digest,
        "modified": _utc(int(stat.st_mtime)),
    }


@lru_cache(maxsize=1024)  # a store's files are mostly written many in a second
def _utc(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _base(header: Header) -> str:
    """The recorded name of the base model, or the kind of model if none was recorded."""
    name = header.meta.get("base_model")
    if not name and isinstance(peft := header.meta.get("peft"), dict):
        name = peft.get("base_model_name_or_path")
    return str(name or header.base.model_type or "unknown")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Ten thousand rows are kept, none is garbage: looking for some among them takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
