"""Which adapters a call of `preft convert` is about, and where each goes. Core install only: names, not tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine_patch.errors import PreftError
from engine_patch.rule import is_prefill_only
from engine_patch.store import SUFFIX, check_name
from preft_cli.adapters.layout import PREFILL_CONFIG, PYREFT_CHECKPOINT
from preft_cli.adapters.pyreft.told import METHOD_AT, NOTHING, Told
from preft_cli.adapters.sources import Source, default_name
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.dtype import served_dtype
from preft_cli.convert.find import find_sources
from preft_cli.convert.results import ConvertPlan, FailedItem, PlannedItem, Target
from preft_cli.errors import UserError
from preft_cli.models.peek import peek_config


def plan_convert(
    sources: Sequence[Path],
    config: PreftConfig,
    root: Path,
    *,
    name: str | None = None,
    method: str | None = None,
    told: Told = NOTHING,
    to: Target = "store",
    out: Path | None = None,
    check: bool = False,
) -> ConvertPlan:
    """Find the adapters at `sources` and decide on names and destinations; nothing is read but small configs.

    A source may be a pattern that the shell did not expand.

    No source means: the adapter that `preft train` made; with `check` the whole store; with `to="peft"` the store's
    file of the config's adapter. Relative paths of the config are relative to `root`. `told` concerns pyreft folders alone.

    Raises:
        UserError: options that contradict each other (exit code 2).
    """
    _check_options(method, told, to, out, check)
    store = root / config.convert.store
    paths = list(sources) or [_default_source(config, root, store, to, check)]
    found = find_sources(paths)
    if name is not None and len(found.sources) > 1:
        raise UserError(f"--name names one adapter, and {len(found.sources)} were found; convert one at a time", 2)
    _check_told(told, found.sources)
    inside = (".", "adapter", PYREFT_CHECKPOINT)
    single = len(paths) == 1 and bool(found.sources) and found.sources[0].path in [paths[0] / name for name in inside]
    # The way back and the check take the tensors as they are.
    dtype = served_dtype(config, peek_config(config.model.base, root)) if to == "store" and not check else None

    taken: dict[str, str] = {}
    items, failed = [], list(found.failed)
    for source in found.sources:
        try:
            item_name = _name(source, name, config.model.base, taken)
        except (PreftError, UserError) as error:
            failed.append(FailedItem.of(source.path, str(error)))
            continue
        taken[item_name] = str(source.path)
        destination = _destination(source, item_name, store, out, single, check)
        of_pyreft = told if source.kind == "pyreft" else NOTHING
        items.append(
            PlannedItem(
                source=str(source.path),
                kind=source.kind,
                name=item_name,
                method=method or _method(source, of_pyreft),
                dtype=dtype,
                **of_pyreft._asdict(),
                path=str(destination),
                replaces=destination.exists() and not check,
            )
        )
    return ConvertPlan(
        action="check" if check else "convert",
        to=to,
        base=config.model.base,
        store=str(store),
        dtype=dtype,
        items=items,
        failed=failed,
        notes=found.notes,
    )


def _check_options(method: str | None, told: Told, to: Target, out: Path | None, check: bool) -> None:
    if to == "peft" and out is None:
        raise UserError("--to peft needs --out DIR, the folder to write to", 2)
    if check and to == "peft":
        raise UserError("--check verifies .preft files; it does not go with --to peft", 2)
    if check and method is not None:
        raise UserError("--check writes nothing; it does not go with --method", 2)
    if check and told != NOTHING:
        raise UserError("--check goes by what the store's file says; it takes no --positions and no --intervention", 2)
    if method is not None and told.positions is not None and is_prefill_only(method) != (told.positions == "prompt"):
        raise UserError(f"--method {method} and --positions {told.positions} do not agree; one of them is enough", 2)


def _check_told(told: Told, sources: Sequence[Source]) -> None:
    """Among other adapters it concerns the pyreft folders alone; without any it is a mistake."""
    if told != NOTHING and sources and all(source.kind != "pyreft" for source in sources):
        option = "--positions" if told.positions else "--intervention"
        raise UserError(
            f"{option} is for pyreft folders, and there is none among the sources; other adapters say it themselves", 2
        )


def _default_source(config: PreftConfig, root: Path, store: Path, to: Target, check: bool) -> Path:
    if check:
        return store
    if to == "peft":
        return store / f"{config.adapter.name}{SUFFIX}"
    return root / config.output_dir / "adapter"


def _name(source: Source, given: str | None, base: str, taken: dict[str, str]) -> str:
    name = given or default_name(source)
    try:
        check_name(name, (base,))
    except PreftError as error:
        raise PreftError(f"{error} (--name NAME chooses one)") from error
    if name in taken:
        raise UserError(f"{taken[name]} and {source.path} are both called {name!r}; convert one of them with --name")
    return name


def _method(source: Source, told: Told) -> str | None:
    """A stock PEFT LoRA was trained on all tokens; of a pyreft folder a person says it; others say themselves what they are."""
    if told.positions is not None:
        return METHOD_AT[told.positions]
    return "lora" if source.kind == "peft" and not (source.path / PREFILL_CONFIG).exists() else None


def _destination(source: Source, name: str, store: Path, out: Path | None, single: bool, check: bool) -> Path:
    if out is not None:
        # One adapter goes right into --out, several side by side below it.
        return out if single else out / name
    if check and source.kind == "store-file":
        return source.path
    return store / f"{name}{SUFFIX}"
