"""Which adapters a call of `preft convert` is about, and where each goes. Core install only: names, not tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine_patch.errors import PreftError
from engine_patch.store import SUFFIX, check_name
from preft_cli.adapters.layout import PREFILL_CONFIG
from preft_cli.adapters.sources import Source, default_name, find
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.results import ConvertPlan, FailedItem, PlannedItem, Target
from preft_cli.errors import UserError


def plan_convert(
    sources: Sequence[Path],
    config: PreftConfig,
    root: Path,
    *,
    name: str | None = None,
    method: str | None = None,
    to: Target = "store",
    out: Path | None = None,
    check: bool = False,
) -> ConvertPlan:
    """Find the adapters at `sources` and decide on names and destinations; nothing is read but small configs.

    No source means: the adapter that `preft train` made; with `check` the whole store; with `to="peft"` the store's
    file of the config's adapter. Relative paths of the config are relative to `root`.

    Raises:
        UserError: options that contradict each other (exit code 2).
    """
    _check_options(method, to, out, check)
    store = root / config.convert.store
    failed: list[FailedItem] = []
    notes: list[str] = []
    found: list[Source] = []
    paths = list(sources) or [_default_source(config, root, store, to, check)]
    for path in paths:
        found += _find(path, failed, notes)
    if name is not None and len(found) > 1:
        raise UserError(f"--name names one adapter, and {len(found)} were found; convert one at a time", 2)
    single = len(paths) == 1 and bool(found) and found[0].path in (paths[0], paths[0] / "adapter")

    items: dict[str, PlannedItem] = {}
    for source in found:
        try:
            item_name = _name(source, name, config.model.base, {n: i.source for n, i in items.items()})
        except (PreftError, UserError) as error:
            failed.append(FailedItem.of(source.path, str(error)))
            continue
        destination = _destination(source, item_name, store, out, single, check)
        items[item_name] = PlannedItem(
            source=str(source.path),
            kind=source.kind,
            name=item_name,
            method=method or _method(source),
            path=str(destination),
            replaces=destination.exists() and not check,
        )
    return ConvertPlan(
        action="check" if check else "convert",
        to=to,
        base=config.model.base,
        store=str(store),
        items=list(items.values()),
        failed=failed,
        notes=notes,
    )


def _check_options(method: str | None, to: Target, out: Path | None, check: bool) -> None:
    if to == "peft" and out is None:
        raise UserError("--to peft needs --out DIR, the folder to write to", 2)
    if check and to == "peft":
        raise UserError("--check verifies .preft files; it does not go with --to peft", 2)
    if check and method is not None:
        raise UserError("--check writes nothing; it does not go with --method", 2)


def _default_source(config: PreftConfig, root: Path, store: Path, to: Target, check: bool) -> Path:
    if check:
        return store
    if to == "peft":
        return store / f"{config.adapter.name}{SUFFIX}"
    return root / config.output_dir / "adapter"


def _find(path: Path, failed: list[FailedItem], notes: list[str]) -> list[Source]:
    """The adapters at one given path; what is none goes to `failed`, other files of a folder to `notes`."""
    sources, refused = [], 0
    try:
        for entry in find(path):
            if isinstance(entry, Source):
                sources.append(entry)
            elif entry.path.is_dir() or entry.path.is_symlink() or entry.path.suffix == SUFFIX:
                refused += 1
                failed.append(FailedItem.of(entry.path, entry.reason))
            else:
                notes.append(f"{entry.path} is no adapter and was passed over")
    except UserError as error:
        # `runs/NAME/adapter` is where training ends: most often it has not been run yet.
        hint = "; run preft train first" if path.name == "adapter" and not path.exists() else ""
        failed.append(FailedItem.of(path, f"{error}{hint}"))
        return []
    except OSError as error:
        failed.append(FailedItem.of(path, f"cannot list it: {error.strerror}"))
        return []
    if not sources and not refused:
        failed.append(FailedItem.of(path, f"there is no adapter in {path}"))
    return sources


def _name(source: Source, given: str | None, base: str, taken: dict[str, str]) -> str:
    name = given or default_name(source)
    try:
        check_name(name, (base,))
    except PreftError as error:
        raise PreftError(f"{error} (--name NAME chooses one)") from error
    if name in taken:
        raise UserError(f"{taken[name]} and {source.path} are both called {name!r}; convert one of them with --name")
    return name


def _method(source: Source) -> str | None:
    """A stock PEFT LoRA was trained on all tokens; every other source says itself what it is."""
    return "lora" if source.kind == "peft" and not (source.path / PREFILL_CONFIG).exists() else None


def _destination(source: Source, name: str, store: Path, out: Path | None, single: bool, check: bool) -> Path:
    if out is not None:
        # One adapter goes right into --out, several side by side below it.
        return out if single else out / name
    if check and source.kind == "store-file":
        return source.path
    return store / f"{name}{SUFFIX}"
