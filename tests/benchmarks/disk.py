"""Files with and without their pages in the system's cache, and how fast `dd` reads them."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
from pathlib import Path

import numpy as np

COLD_SHARE = 0.01
"""A file counts as cold if no more of it is in the page cache."""

_libc = ctypes.CDLL(None, use_errno=True)


def drop(path: Path) -> float:
    """Take a file, or all of a folder's files, out of the page cache; returns the share that is still in it."""
    files = _files(path)
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that were not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return cached_share(path)


def cached_share(path: Path) -> float:
    """The share of a file's (or a folder's) pages that is in the page cache, by `mincore`."""
    cached = pages = 0
    for file in _files(path):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            state = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            failed = _libc.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(state.ctypes.data)
            )
            del view  # a mapping with views cannot be closed
            if failed:
                raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}")
            cached += int((state & 1).sum())
            pages += len(state)
    return cached / pages


def dd_seconds(path: Path) -> float:
    """What `dd if=FILE of=/dev/null bs=1M` says it took: its own clock, without the start of its process."""
    command = ["dd", f"if={path}", "of=/dev/null", "bs=1M"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stderr
    found = re.search(r"copied, ([\d.e+-]+) s", said)
    if found is None:
        raise ValueError(f"dd said {said!r}")
    return float(found[1])


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
