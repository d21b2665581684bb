"""`preft convert`: adapters into the store, back to PEFT, and the check of a store."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from preft_cli.adapters.pyreft.told import NOTHING, Told
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.dtype import served_dtype
from preft_cli.convert.plan import plan_convert
from preft_cli.convert.results import ConvertedItem, ConvertPlan, ConvertResult, FailedItem, Target
from preft_cli.convert.stamp import unchanged
from preft_cli.convert.workers import Outcome, cores, in_processes

if TYPE_CHECKING:
    from engine_patch.base_model import BaseFingerprint
    from preft_cli.adapters.base import BaseFacts
    from preft_cli.models import BaseModel

__all__ = ["ConvertPlan", "ConvertResult", "convert", "plan_convert"]

SECONDS_A_BYTE = 1 / 100e6
SECONDS_AN_ADAPTER = 0.01
START_S = 8.0
"""What one core takes for an adapter, and to start a worker (it loads torch): measured on two busy cores."""


def convert(
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
    jobs: int | None = None,
    force: bool = False,
) -> ConvertResult:
    """Convert (or with `check` verify) every adapter at `sources`; see `plan_convert` for what goes where.

    One that fails never stops the others: it is in `failed` with its reason. What the store holds already is left as it
    is, unless `force`d. `jobs` processes share the work; None: as many as there are cores, if that is faster; 1: none but
    this one. Warnings and progress go to stderr.

    Raises:
        UserError: options that contradict each other, or a base model that cannot be had.
    """
    from preft_cli.console import say, warn

    plan = plan_convert(sources, config, root, name=name, method=method, told=told, to=to, out=out, check=check)
    for note in plan.notes:
        say(note)
    outcomes: list[Outcome] = []
    if plan.items:
        from preft_cli.models import resolve

        base = resolve(plan.base, root)
        plan = _with_dtype(plan, config, base)
        outcomes = _outcomes(plan, config, base, jobs, force or check or to == "peft")
    converted = [outcome for outcome in outcomes if isinstance(outcome, ConvertedItem)]
    for item in converted:
        for note in item.notes:
            warn(f"{item.name}: {note}")
    failed = [*plan.failed, *(outcome for outcome in outcomes if isinstance(outcome, FailedItem))]
    return ConvertResult(
        action=plan.action, to=to, base=plan.base, store=plan.store, converted=converted, failed=failed
    )


def _with_dtype(plan: ConvertPlan, config: PreftConfig, base: BaseModel) -> ConvertPlan:
    """The plan, now that the base model is here for sure: `auto` may have needed it."""
    from preft_cli.models.peek import read_config

    if plan.to == "peft" or plan.action == "check":
        return plan
    dtype = served_dtype(config, read_config(base.path))
    items = [item.model_copy(update={"dtype": dtype}) for item in plan.items]
    return plan.model_copy(update={"dtype": dtype, "items": items})


def _outcomes(plan: ConvertPlan, config: PreftConfig, base: BaseModel, jobs: int | None, force: bool) -> list[Outcome]:
    """What became of each item, in the plan's order."""
    from preft_cli.console import progress, say

    done: dict[int, Outcome] = {}
    if not force:
        fingerprint = _fingerprint(base)
        found = ((at, unchanged(item, fingerprint)) for at, item in enumerate(plan.items))
        done = {at: outcome for at, outcome in found if outcome is not None}
    left = [at for at in range(len(plan.items)) if at not in done]
    if not left:
        return [done[at] for at in sorted(done)]
    from preft_cli.adapters.base import BaseFacts

    facts = BaseFacts.of(base, config.model.residual_stream)
    doing = "checking" if plan.action == "check" else "converting"
    try:
        with progress(doing, total=len(left), unit="adapters") as bar, closing(_work(plan, left, facts, jobs)) as work:
            for at, outcome in work:
                done[at] = outcome
                bar.advance(note=plan.items[at].name)
    except KeyboardInterrupt:
        say(f"{len(done)} of {len(plan.items)} adapters are done and stay; run the same again for the others")
        raise
    return [done[at] for at in sorted(done)]


def _fingerprint(base: BaseModel) -> BaseFingerprint:
    """The base model's, without loading Transformers: fields that its config leaves to a default are not compared."""
    from engine_patch.base_model import BaseFingerprint, weights_digest
    from preft_cli.models.peek import read_config

    weights = None if base.random else weights_digest(base.path)
    return BaseFingerprint.from_hf_config(read_config(base.path) or {}, weights=weights)


def _work(plan: ConvertPlan, left: list[int], base: BaseFacts, jobs: int | None) -> Generator[tuple[int, Outcome]]:
    """Do the items at the positions `left`; yields the position and the outcome of each, as they end."""
    from preft_cli.convert.work import do_item

    todo = {at: plan.items[at] for at in left}
    count = jobs or _worth(plan, left)
    if count > 1 and len(todo) > 1:
        with closing(in_processes(list(todo.values()), base, plan.action, plan.to, count)) as ended:
            for index, outcome in ended:
                todo.pop(left[index])
                yield left[index], outcome
    for at, item in todo.items():
        yield at, do_item(item, base, plan.action, plan.to)


def _worth(plan: ConvertPlan, left: list[int]) -> int:
    """How many processes pay for their start."""
    size = sum(_bytes(Path(plan.items[at].source)) for at in left)
    seconds = size * SECONDS_A_BYTE + len(left) * SECONDS_AN_ADAPTER
    return min(cores(), int(seconds / START_S) + 1)


def _bytes(source: Path) -> int:
    try:
        files = list(source.iterdir()) if source.is_dir() else [source]
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0
