"""The end of a run, for people."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from preft_cli.console import duration, err, say
from preft_cli.training.measure import Measured
from preft_cli.training.result import EarlierRun, LastAdapter, RunResult, TrainResult

SHOWN = 10
"""Earlier runs in the table."""
_COMPARED = {"adapter", "method", "ranks", "trainable_parameters", "steps"}


def print_result(result: TrainResult) -> None:
    """A table of the run, one that compares it with earlier ones, and where each artefact lies, on stderr."""
    print_run(result, _facts(result))


def print_run(result: RunResult, facts: dict[str, str]) -> None:
    """The same of any run, with the rows of its table."""
    table = Table("trained", escape(result.adapter))
    for name, value in facts.items():
        table.add_row(name, escape(value))
    err.print(table)
    if result.held_out and result.beside:
        err.print(_comparison(result, result.held_out))
    # Outside of the table, which would cut paths to the terminal's width: they are there to be copied.
    width = max(map(len, result.artefacts))
    for name, path in result.artefacts.items():
        say(f"{name:<{width}}  {path}")


def _comparison(result: RunResult, held_out: Measured) -> Table:
    """This run and the best of those beside it, best first."""
    measure = held_out.measure
    earlier = sorted(result.beside, key=_order)
    more = f"and {len(earlier) - SHOWN} more in result.json" if len(earlier) > SHOWN else None
    table = Table(title="beside earlier runs on the same held-out rows", title_justify="left", caption=more)
    table.add_column("run", overflow="fold", min_width=10)
    table.add_column("method", no_wrap=True)
    for column in ("rank", "parameters", "steps", measure.name, "change"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row("base model", "", "", "", "", measure.text(held_out.base_value), "")
    this = EarlierRun.model_validate({"folder": Path(), "held_out": held_out, **result.model_dump(include=_COMPARED)})
    for run in sorted([this, *earlier[:SHOWN]], key=_order):
        table.add_row(
            "this run" if run is this else escape(run.folder.name),
            run.method,
            ranks_text(run.ranks),
            _millions(run.trainable_parameters),
            str(run.steps),
            measure.text(run.held_out.adapter_value),
            measure.change(run.held_out.adapter_value, held_out.base_value),
            style="bold" if run is this else None,
        )
    return table


def _order(run: EarlierRun) -> float:
    return run.held_out.measure.order(run.held_out.adapter_value)


def about(result: RunResult) -> dict[str, str]:
    """What was trained: the rows that begin the table of any run."""
    return {
        "method": f"{result.method} of rank {ranks_text(result.ranks)} on {result.base_model}",
        "parameters": _parameters(result),
        "rows": f"{result.rows}"
        + (f" ({result.dropped} longer than train.max_length dropped)" if result.dropped else ""),
        "steps": f"{result.steps} ({result.epochs:.2f} epochs)",
    }


def _facts(result: TrainResult) -> dict[str, str]:
    facts = about(result)
    if result.stopped_early:
        facts["steps"] += ", stopped early"
    if result.chosen_on:
        facts["kept"] = f"step {result.kept_step}, by {result.chosen_on} loss"
    if result.train_loss is not None:
        facts["training loss"] = f"{result.train_loss:.2f}"
    if result.validation:
        facts["validation loss"] = result.validation.summary()
    if result.held_out:
        chosen = " (also used for choosing)" if result.chosen_on == "held-out" else ""
        facts["held-out loss"] = result.held_out.summary() + chosen
    if result.last:
        facts[f"last adapter, step {result.last.step}"] = _last_losses(result.last)
    facts["speed"] = (
        f"{result.tokens_per_s:.0f} tokens/s, {result.dtype} on {where(result)}, {duration(result.seconds)}"
    )
    return facts | memory(result)


def memory(result: RunResult) -> dict[str, str]:
    """The row of the peak memory, if it is known."""
    if result.peak_memory is None:
        return {}
    each = "" if result.num_processes == 1 else " each"
    return {"memory": f"{result.peak_memory / 2**30:.2f} GiB at most{each}"}


def _last_losses(last: LastAdapter) -> str:
    losses = {"validation": last.validation, "held-out": last.held_out}
    return ", ".join(f"{name} loss {loss:.2f}" for name, loss in losses.items() if loss is not None)


def where(result: RunResult) -> str:
    """`cuda`, or `2 x cuda`."""
    return result.device if result.num_processes == 1 else f"{result.num_processes} x {result.device}"


def ranks_text(ranks: dict[str, int]) -> str:
    """16+8 for lorap+direftp, unless both are the same."""
    return "+".join(map(str, ranks.values() if len(set(ranks.values())) > 1 else list(ranks.values())[:1])) or "?"


def _parameters(result: RunResult) -> str:
    total = _millions(result.trainable_parameters)
    parts = " + ".join(f"{part} {_millions(number)}" for part, number in result.parameters.items())
    return f"{total} ({parts})" if len(result.parameters) > 1 else total


def _millions(number: int) -> str:
    return f"{number / 1e6:.2f}M"
