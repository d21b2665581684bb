"""`preft bench`: what adapters cost, and what prompt-only adapters give back."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from preft_cli.commands import bench_compare
from preft_cli.commands.bench_options import FailOn, Out, PresetName, Resume, SweepOver
from preft_cli.commands.options import Config, DryRun, Json, Set, load_config

if TYPE_CHECKING:
    from preft_cli.bench.fail_on import Condition
    from preft_cli.bench.plan import BenchPlan
    from preft_cli.bench.results import BenchResult
    from preft_cli.bench.sweep import Sweep
    from preft_cli.bench.sweep_result import SweepResult
    from preft_cli.config.load import Loaded

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    invoke_without_command=True,
    subcommand_metavar="[compare A.json B.json]",
)


@app.callback()
def command(
    context: typer.Context,
    config: Config = None,
    sets: Set = None,
    preset: PresetName = None,
    out: Out = None,
    fail_on: FailOn = None,
    sweep: SweepOver = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Measure throughput with and without adapters, or compare two results.

    The arms of bench.arms get the same requests. A picture and its numbers as CSV lie beside the result.
    The exit code is 1 if a request failed, else 3 if a condition of --fail-on is met.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    from preft_cli.bench.fail_on import parse
    from preft_cli.bench.presets import overrides
    from preft_cli.commands.output import needs_extras, print_json, quiet_stdout, require

    loaded = load_config(config, sets, preset=overrides(preset))
    conditions = parse(fail_on or [], list(dict.fromkeys(["base", *loaded.config.bench.arms])))
    over = _sweep_over(sweep or [], loaded)
    with needs_extras("bench"), quiet_stdout(dry_run or as_json), _tidy_after_sigterm():
        if dry_run:
            plan = _plan(loaded, over)
        else:
            require("vllm", "bench")
            result = _measure(loaded, over, out.absolute() if out else None, resume, preset)
    if dry_run:
        print_json(plan)
        return
    if as_json:
        print_json(result)
    _finish(result, conditions, show=not as_json)


app.command("compare")(bench_compare.command)


@contextmanager
def _tidy_after_sigterm() -> Iterator[None]:
    """SIGTERM, as `timeout` and CI send it, takes engines and adapter files down as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _refuse_options(context: typer.Context) -> None:
    """`preft bench --json compare A B`: options before the subcommand would silently do nothing."""
    from preft_cli.errors import UserError

    if any(context.params.values()):
        raise UserError(
            f"preft bench {context.invoked_subcommand}: give --json behind {context.invoked_subcommand}; "
            "the other options of preft bench are for measuring and do not go with it",
            2,
        )


def _sweep_over(texts: list[str], loaded: Loaded) -> Sweep | None:
    from preft_cli.errors import UserError

    if not texts:
        return None
    if len(texts) > 1:
        raise UserError(f"--sweep is given {len(texts)} times; a run sweeps one key", 2)
    from preft_cli.bench.sweep import parse_sweep

    return parse_sweep(texts[0], loaded.config)


def _plan(loaded: Loaded, over: Sweep | None) -> BenchPlan | dict[str, Any]:
    """What would be done; of a sweep: for each value."""
    from preft_cli.bench.plan import plan_bench

    if over is None:
        return plan_bench(loaded.config, loaded.root)
    plans = {value: plan_bench(config, loaded.root) for value, config in over.configs.items()}
    return {
        "sweep": over.key,
        "plans": [{"value": value, "plan": plan.model_dump(mode="json")} for value, plan in plans.items()],
    }


def _measure(
    loaded: Loaded, over: Sweep | None, out: Path | None, resume: bool, preset: str | None
) -> BenchResult | SweepResult:
    if over is not None:
        from preft_cli.bench.sweep import run_sweep

        return run_sweep(over, loaded.root, out, resume=resume, preset=preset)
    from preft_cli.bench.run import bench

    return bench(loaded.config, loaded.root, out, resume=resume, preset=preset)


def _finish(result: BenchResult | SweepResult, conditions: list[Condition], show: bool) -> None:
    """Tables and pictures, then the exit code: 1 before 3, for the speed of failed requests says nothing."""
    from preft_cli.bench.plot import plot_result, plot_sweep
    from preft_cli.bench.sweep_result import SweepResult
    from preft_cli.console import error

    measured: Iterable[tuple[str, BenchResult]]
    if isinstance(result, SweepResult):
        if show:
            from preft_cli.bench.sweep_report import print_sweep

            print_sweep(result)
        plot_sweep(result)
        measured = ((f"{result.key}={point.value}: ", one) for point, one in result.results())
    else:
        if show:
            from preft_cli.bench.report import print_result

            print_result(result)
        plot_result(result)
        measured = [("", result)]
    met = [where + said for where, one in measured for condition in conditions if (said := condition.met(one))]
    for sentence in met:
        error(sentence)
    if result.failures or met:
        raise typer.Exit(1 if result.failures else 3)
