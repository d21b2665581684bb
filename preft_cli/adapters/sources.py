"""What kind of adapter lies at a path. Looks at names only, so that plans need no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from engine_patch.store import SUFFIX, adapter_name
from preft_cli.adapters.layout import (
    PEFT_BIN,
    PEFT_BIN_INDEX,
    PEFT_CONFIG,
    PEFT_INDEX,
    PEFT_WEIGHTS,
    PREFILL_CONFIG,
    PREFILL_WEIGHTS,
    PYREFT_CHECKPOINT,
    PYREFT_CONFIG,
    PYREFT_PREFIX,
    TRAINED_CONFIG,
    TRAINED_WEIGHTS,
)
from preft_cli.errors import UserError

Kind = Literal["trained", "peft", "pyreft", "store-file"]

EXPECTED = (
    f"expected a trained adapter ({TRAINED_CONFIG}), a PEFT LoRA ({PEFT_CONFIG}), a pyreft folder (intkey_*.bin), "
    f"a NAME{SUFFIX} file, or a folder of those"
)


class Source(NamedTuple):
    """One adapter to read."""

    path: Path
    kind: Kind


class Rejected(NamedTuple):
    """Something that is no adapter."""

    path: Path
    reason: str


def detect(path: Path) -> Kind | Literal["folder"]:
    """The kind of adapter at `path`, or `folder` when it may hold several.

    Raises:
        UserError: nothing there, something that cannot be read, with what was expected, or adapters of several kinds in one.
    """
    if path.is_file():
        if path.suffix == SUFFIX:
            return "store-file"
        known = path.name in _KNOWN or path.name.startswith(PYREFT_PREFIX)
        hint = f"; did you mean its folder {path.parent}?" if known else ""
        raise UserError(f"{path} is not an adapter: {EXPECTED}{hint}")
    if not path.is_dir():
        raise UserError(f"{path} does not exist: {EXPECTED}")
    held = _held(path)
    if len(held) > 1:
        raise UserError(
            f"{path} holds {' and '.join(held.values())}, and a folder holds one adapter. If they were trained apart, move "
            "each into a folder of its own; if together, neither computes the same without the other: train one of them alone"
        )
    return next(iter(held), "folder")


def _held(path: Path) -> dict[Kind, str]:
    """The kinds of adapters whose files lie in the folder, each in words for people.

    Beside files of one kind, the adapter of a run further in counts as well: either alone would be half of what is there.
    """
    held: dict[Kind, str] = {}
    if file := _first(path, _TRAINED_FILES):
        held["trained"] = f"a trained adapter ({file})"
    if file := _first(path, _PEFT_FILES):
        held["peft"] = f"a PEFT LoRA ({file})"
    if file := _pyreft_file(path):
        held["pyreft"] = f"pyreft interventions ({file})"
    if held and (run := _of_run(path)):
        held.setdefault(run.kind, f"the {run.kind} adapter {run.path.name}/")
    return held


def _first(path: Path, names: Sequence[str]) -> str | None:
    return next((name for name in names if (path / name).exists()), None)


_TRAINED_FILES = (TRAINED_CONFIG, TRAINED_WEIGHTS)
_PEFT_FILES = (PEFT_CONFIG, PREFILL_CONFIG, PREFILL_WEIGHTS, PEFT_WEIGHTS, PEFT_BIN, PEFT_INDEX, PEFT_BIN_INDEX)
_KNOWN = {*_PEFT_FILES, *_TRAINED_FILES}


def find(path: Path) -> Iterator[Source | Rejected]:
    """The adapters at `path`: itself, or one level below (a training run's folder counts as the adapter that it holds).

    Yields what cannot be read as `Rejected`, so that one bad entry does not stop the others; hidden entries are
    passed over. Symbolic links are not followed out of a folder.

    Raises:
        UserError: `path` itself does not exist or is no adapter and no folder.
    """
    kind = detect(path)
    if kind != "folder":
        yield Source(path, kind)
        return
    if run := _of_run(path):
        yield run
        return
    with os.scandir(path) as listing:
        entries = sorted((entry for entry in listing if entry.name[0] != "."), key=lambda entry: entry.name)
    for entry in entries:
        # Most entries of a large store: nothing more to ask the file system about them.
        plain = entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)
        yield Source(Path(entry.path), "store-file") if plain else _child(Path(entry.path), path)


def _child(entry: Path, folder: Path) -> Source | Rejected:
    run = _of_run(entry)
    if reason := leaves(entry, folder) or (leaves(run.path, folder) if run else None):
        return Rejected(entry, reason)
    try:
        kind = detect(entry)
    except UserError as error:
        return Rejected(entry, str(error))
    if kind != "folder":
        return Source(entry, kind)
    if run:
        return run
    empty = next(entry.iterdir(), None) is None
    return Rejected(entry, f"{entry} is empty: {EXPECTED}" if empty else f"{entry} is not an adapter: {EXPECTED}")


def leaves(entry: Path, folder: Path) -> str | None:
    """Why `entry` must not be followed: it, or a file right in it, is a symbolic link out of `folder`."""
    root = folder.resolve()
    inside = [entry, *entry.iterdir()] if entry.is_dir() and not entry.is_symlink() else [entry]
    for path in inside:
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            return f"{path} is a symbolic link that leaves {folder} (to {path.resolve()}); copy the adapter instead"
    return None


def default_name(source: Source) -> str:
    """The adapter's name on the server: as trained, or the file's or folder's name."""
    if source.kind == "store-file":
        return adapter_name(source.path)
    if source.kind == "trained":
        from preft_cli.adapters.trained_config import read_trained_config

        return read_trained_config(source.path).name
    folder = source.path.resolve()
    return folder.parent.name if folder.name == PYREFT_CHECKPOINT else folder.name


def _of_run(path: Path) -> Source | None:
    """The adapter in the folder of a training run, ours or pyreft's."""
    if (path / "adapter" / TRAINED_CONFIG).is_file():
        return Source(path / "adapter", "trained")
    inner = path / PYREFT_CHECKPOINT
    # The run of pyreft's example holds the adapter itself, and perhaps such a folder beside it.
    return Source(inner, "pyreft") if inner.is_dir() and not _pyreft_file(path) and _pyreft_file(inner) else None


def _pyreft_file(path: Path) -> str | None:
    """The name of the file in the folder that tells of interventions; a `config.json` of anything else does not."""
    if file := min((found.name for found in path.glob(f"{PYREFT_PREFIX}*")), default=None):
        return file
    try:
        config = json.loads((path / PYREFT_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    told = isinstance(config, dict) and ("intervention_types" in config or "representations" in config)
    return PYREFT_CONFIG if told else None
