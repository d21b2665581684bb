"""Files that are either whole or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def atomic_write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks` to a hidden file beside `path`, flush it to the disk, and rename it.

    On any failure (a full disk, Ctrl-C) the file that was there before is left as it was, and no remains stay behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
