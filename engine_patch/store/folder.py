"""A store: a folder of `NAME.preft` files. Listing it opens none of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engine_patch.errors import PreftError
from engine_patch.store.format import SUFFIX

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NAME_RULE = "use 1 to 128 letters (A-Z, a-z), digits, '.', '_' and '-', starting with a letter or digit"


@dataclass(frozen=True)
class StoreListing:
    """What lies in a store's folder."""

    files: dict[str, str] = field(default_factory=dict)
    """Path by adapter name, sorted by name. As text: making ten thousand `Path`s takes as long as reading their headers."""
    rejected: list[tuple[Path, str]] = field(default_factory=list)
    """`.preft` entries that must not be used, each with the reason."""


def adapter_name(path: Path) -> str:
    """`store/tone.preft` -> `tone`."""
    return path.name.removesuffix(SUFFIX)


def check_name(name: str, base_names: Iterable[str] = ()) -> str:
    """Return `name` if an adapter may be called so.

    Raises:
        PreftError: a name that breaks the rule (it is a file name and a model name at once), or the base model's own.
    """
    if not _NAME.fullmatch(name):
        raise PreftError(f"adapter name {name!r} is not allowed: {NAME_RULE}")
    if name in set(base_names):
        raise PreftError(f"adapter name {name!r} is the base model's own name; give the adapter another one")
    return name


def scan_store(folder: Path) -> StoreListing:
    """List `folder` without opening a file; hidden and temporary files and other kinds of files are passed over.

    Raises:
        PreftError: the folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            found = sorted((e for e in entries if e.name.endswith(SUFFIX) and e.name[0] != "."), key=lambda e: e.name)
    except OSError as error:
        raise PreftError(f"cannot list the adapter store {folder}: {error.strerror}") from error
    listing = StoreListing()
    for entry in found:
        if reason := _refusal(entry, folder):
            listing.rejected.append((Path(entry.path), reason))
        else:
            listing.files[entry.name.removesuffix(SUFFIX)] = entry.path
    return listing


def file_in_store(folder: Path, name: str) -> Path | None:
    """The file of `name` in a store; None if there is none, or no file can have this name.

    Raises:
        PreftError: there is one that must not be used.
    """
    if not _NAME.fullmatch(name):
        return None
    path = folder / f"{name}{SUFFIX}"
    if path.is_symlink() and (reason := _leaves(path, folder)):
        raise PreftError(f"{path} {reason}")
    return path if path.is_file() else None


def list_store(folder: Path) -> dict[str, Path]:
    """The usable files of a store: path by name. `scan_store` also tells what was refused and why."""
    return {name: Path(path) for name, path in scan_store(folder).files.items()}


def _refusal(entry: os.DirEntry[str], folder: Path) -> str | None:
    try:
        check_name(entry.name.removesuffix(SUFFIX))
    except PreftError as error:
        return str(error)
    if entry.is_symlink() and (reason := _leaves(Path(entry.path), folder)):
        return reason
    if not entry.is_file():
        return "is not a file"
    return None


def _leaves(link: Path, folder: Path) -> str | None:
    """A link may rename, it may not reach out: the store is what its folder holds."""
    target = link.resolve()
    if target.is_relative_to(folder.resolve()):
        return None
    return f"is a symbolic link that leaves the folder (to {target}); copy the file into the store"
