"""From what was written on the command line to adapters: paths, folders of adapters, and patterns."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine_patch.store import SUFFIX
from preft_cli.adapters.sources import Rejected, Source, find, leaves
from preft_cli.convert.results import FailedItem
from preft_cli.errors import UserError


@dataclass
class Found:
    """What lies at the given sources."""

    sources: list[Source] = field(default_factory=list)
    failed: list[FailedItem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was passed over, such as other files in a folder."""


def find_sources(paths: list[Path]) -> Found:
    """The adapters at `paths`, in that order, each once. A path that does not exist and holds `*`, `?` or `[` is a pattern.

    What a pattern matches is treated like the entries of a folder: a symbolic link that leaves it is refused, other files
    are passed over. What is no adapter is in `failed` with its reason.
    """
    found = Found()
    for path in paths:
        before = (len(found.sources), len(found.failed))
        entries = _matches(path, found) if _is_pattern(path) else _at(path, found)
        for entry in entries:
            _sort_in(entry, found)
        if before == (len(found.sources), len(found.failed)):
            found.failed.append(FailedItem.of(path, f"there is no adapter in {path}"))
    found.sources = list(dict.fromkeys(found.sources))
    return found


def _is_pattern(path: Path) -> bool:
    return glob.has_magic(str(path)) and not path.exists()


def _matches(pattern: Path, found: Found) -> Iterator[Source | Rejected]:
    # Not Path.glob, which takes no absolute pattern and finds hidden files.
    matches = sorted(glob.glob(str(pattern), recursive=True))  # noqa: PTH207
    if not matches:
        found.failed.append(FailedItem.of(pattern, "nothing matches this pattern"))
    for match in map(Path, matches):
        if reason := leaves(match, match.parent):
            yield Rejected(match, reason)
        elif match.is_file() and match.suffix != SUFFIX:
            yield Rejected(match, "is no adapter")
        else:
            yield from _at(match, found)


def _at(path: Path, found: Found) -> Iterator[Source | Rejected]:
    try:
        yield from find(path)
    except UserError as error:
        # `runs/NAME/adapter` is where training ends: most often it has not been run yet.
        hint = "; run preft train first" if path.name == "adapter" and not path.exists() else ""
        found.failed.append(FailedItem.of(path, f"{error}{hint}"))
    except OSError as error:
        found.failed.append(FailedItem.of(path, f"cannot list it: {error.strerror}"))


def _sort_in(entry: Source | Rejected, found: Found) -> None:
    if isinstance(entry, Source):
        found.sources.append(entry)
    elif entry.path.is_dir() or entry.path.is_symlink() or entry.path.suffix == SUFFIX:
        found.failed.append(FailedItem.of(entry.path, entry.reason))
    else:
        found.notes.append(f"{entry.path} is no adapter and was passed over")
