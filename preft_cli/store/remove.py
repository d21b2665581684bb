"""Files taken out of a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from preft_cli.store.results import BrokenFile, StoreRemoval


def remove(store: Path, files: Mapping[str, Path]) -> StoreRemoval:
    """Unlink each file. A server keeps what it has open or linked; a symbolic link goes, its target stays."""
    removed, failed = [], []
    for name, path in files.items():
        try:
            path.unlink()
        except OSError as error:
            failed.append(BrokenFile(path=str(path), reason=f"cannot remove it: {error.strerror}"))
        else:
            removed.append(name)
    return StoreRemoval(store=str(store), removed=removed, failed=failed)
