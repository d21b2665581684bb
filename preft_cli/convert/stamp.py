"""Which sources need no second conversion: what a file was made from is in its header. No torch here."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.store import read_header
from preft_cli.convert.results import ConvertedItem, PlannedItem

KEY = "converted_from"
"""The key in a `.preft` file's meta."""


def record(item: PlannedItem) -> dict[str, Any]:
    """What to keep in the meta of the file made from `item`; taken before the source is read.

    `files` changes whenever a file of the source does, `at_ns` is given to the new file as its date (`seal`).

    Raises:
        OSError: the source cannot be listed.
    """
    # Whole microseconds: some file systems keep no finer dates.
    return {**_asked(item), "path": item.source, "at_ns": time.time_ns() // 1000 * 1000}


def _asked(item: PlannedItem) -> dict[str, Any]:
    asked = {"files": _digest(Path(item.source)), "method": item.method, "dtype": item.dtype}
    return {**asked, **item.told._asdict()} if item.kind == "pyreft" else asked


def _digest(source: Path) -> str:
    """A short digest of the names, sizes and dates of the source's files."""
    files = []
    for file in sorted(source.iterdir()) if source.is_dir() else [source]:
        found = file.stat()
        if stat.S_ISREG(found.st_mode):
            # ctime as well: it also moves when a file of the same size and date is copied over.
            files.append([file.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns])
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:32]


def seal(path: Path, made_from: dict[str, Any]) -> None:
    """Date the new file as its header says: whoever writes into it later moves the date."""
    os.utime(path, ns=(made_from["at_ns"], made_from["at_ns"]))


def unchanged(item: PlannedItem, base: BaseFingerprint) -> ConvertedItem | None:
    """The finished item if its file holds what the source would give again; None if it must be converted.

    A file whose header is damaged, whose length is wrong, or that was written into since, is never taken for whole.
    """
    path = Path(item.path)
    try:
        # A link in a store is no file of it: converting puts a file in its place.
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return None
        header = read_header(path)
        made_from = header.meta.get(KEY)
        if not isinstance(made_from, dict) or not _is_sealed(found.st_mtime_ns, made_from):
            return None
        if header.base.mismatch(base) or not _same(item, made_from, path):
            return None
    except (PreftError, OSError):
        return None
    return ConvertedItem(
        name=item.name,
        status="unchanged",
        method=header.method,
        rank=header.rank,
        dtype=header.dtype,
        source=item.source,
        path=item.path,
        bytes=found.st_size,
        digest=header.digest,
    )


def _is_sealed(mtime_ns: int, made_from: dict[str, Any]) -> bool:
    at = made_from.get("at_ns")
    # The second form is what a file system with dates in whole seconds makes of it.
    return isinstance(at, int) and mtime_ns in (at, at // 10**9 * 10**9)


def _same(item: PlannedItem, made_from: dict[str, Any], path: Path) -> bool:
    asked = _asked(item)
    if item.kind == "store-file" and path.samefile(item.source):
        # A file that is converted in its place was its own source: it cannot have recorded its own date.
        asked["files"] = made_from.get("files")
    return all(made_from.get(key) == value for key, value in asked.items())
