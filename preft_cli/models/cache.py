"""The user's cache folder, and folders in it that are written once and appear whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from preft_cli.errors import UserError


def cache_dir() -> Path:
    """`$PREFT_CACHE`, else `$XDG_CACHE_HOME/preft`, else `~/.cache/preft`."""
    if own := os.environ.get("PREFT_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "preft"
    return Path.home() / ".cache" / "preft"


def folder_once(name: str, complete: Callable[[Path], bool], write: Callable[[Path], None]) -> Path:
    """The cache's folder `name`, written by `write(folder)` if it is not `complete(folder)` yet.

    Processes that start together wait for the first one. The folder is written aside and renamed, so that an
    interrupted run leaves nothing that looks finished.
    """
    folder = cache_dir() / name
    if complete(folder):
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not complete(folder):
                _replace_folder(folder, write)
    except OSError as error:
        raise UserError(
            f"cannot write the model cache {folder}: {error}. Free some space there, or set PREFT_CACHE to a folder "
            "that can be written."
        ) from error
    return folder


def _replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
