"""The end of a run, for people."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from preft_cli.console import duration, err, say
from preft_cli.training.result import EarlierRun, HeldOutLoss, LastAdapter, TrainResult

SHOWN = 10
"""Earlier runs in the table."""
_COMPARED = {"adapter", "method", "ranks", "trainable_parameters", "steps"}


def print_result(result: TrainResult) -> None:
    """A table of the run, one that compares it with earlier ones, and where each artefact lies, on stderr."""
    table = Table("trained", result.adapter)
    for name, value in _facts(result).items():
        table.add_row(name, value)
    err.print(table)
    if result.held_out and result.beside:
        err.print(_comparison(result, result.held_out))
    # Outside of the table, which would cut paths to the terminal's width: they are there to be copied.
    width = max(map(len, result.artefacts))
    for name, path in result.artefacts.items():
        say(f"{name:<{width}}  {path}")


def _comparison(result: TrainResult, held_out: HeldOutLoss) -> Table:
    """This run and the best of those beside it, best first."""
    earlier = sorted(result.beside, key=lambda run: run.held_out.adapter)
    more = f"and {len(earlier) - SHOWN} more in result.json" if len(earlier) > SHOWN else None
    table = Table(title="beside earlier runs on the same held-out rows", title_justify="left", caption=more)
    table.add_column("run", overflow="fold", min_width=10)
    table.add_column("method", no_wrap=True)
    for column in ("rank", "parameters", "steps", "loss", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row("base model", "", "", "", "", f"{held_out.base:.2f}", "")
    this = EarlierRun(folder=Path(), held_out=held_out, **result.model_dump(include=_COMPARED))
    for run in sorted([this, *earlier[:SHOWN]], key=lambda run: run.held_out.adapter):
        table.add_row(
            "this run" if run is this else escape(run.folder.name),
            run.method,
            _ranks(run.ranks),
            _millions(run.trainable_parameters),
            str(run.steps),
            f"{run.held_out.adapter:.2f}",
            f"{run.held_out.relative_change:+.1%}",
            style="bold" if run is this else None,
        )
    return table


def _facts(result: TrainResult) -> dict[str, str]:
    facts = {
        "method": f"{result.method} of rank {_ranks(result.ranks)} on {result.base_model}",
        "parameters": _parameters(result),
        "rows": f"{result.rows}"
        + (f" ({result.dropped} longer than train.max_length dropped)" if result.dropped else ""),
        "steps": f"{result.steps} ({result.epochs:.2f} epochs)" + (", stopped early" if result.stopped_early else ""),
    }
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
        f"{result.tokens_per_s:.0f} tokens/s, {result.dtype} on {_where(result)}, {duration(result.seconds)}"
    )
    if result.peak_memory is not None:
        facts["memory"] = f"{result.peak_memory / 2**30:.2f} GiB at most" + (
            "" if result.num_processes == 1 else " each"
        )
    return facts


def _last_losses(last: LastAdapter) -> str:
    losses = {"validation": last.validation, "held-out": last.held_out}
    return ", ".join(f"{name} loss {loss:.2f}" for name, loss in losses.items() if loss is not None)


def _where(result: TrainResult) -> str:
    return result.device if result.num_processes == 1 else f"{result.num_processes} x {result.device}"


def _ranks(ranks: dict[str, int]) -> str:
    """16+8 for lorap+direftp, unless both are the same."""
    return "+".join(map(str, ranks.values() if len(set(ranks.values())) > 1 else list(ranks.values())[:1])) or "?"


def _parameters(result: TrainResult) -> str:
    total = _millions(result.trainable_parameters)
    parts = " + ".join(f"{part} {_millions(number)}" for part, number in result.parameters.items())
    return f"{total} ({parts})" if len(result.parameters) > 1 else total


def _millions(number: int) -> str:
    return f"{number / 1e6:.2f}M"
