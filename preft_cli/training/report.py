"""The end of a run, for people."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from preft_cli.console import duration, err, say
from preft_cli.training.result import EarlierRun, HeldOutLoss, TrainResult

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
        "steps": f"{result.steps} ({result.epochs:.2f} epochs)",
        "speed": f"{result.tokens_per_s:.0f} tokens/s, {result.dtype} on {result.device}, {duration(result.seconds)}",
    }
    if result.train_loss is not None:
        facts["training loss"] = f"{result.train_loss:.2f}"
    if held_out := result.held_out:
        change = f"{held_out.relative_change:+.1%}"
        facts["held-out loss"] = f"base {held_out.base:.2f}, adapter {held_out.adapter:.2f} ({change})"
    return facts


def _ranks(ranks: dict[str, int]) -> str:
    """16+8 for lorap+direftp, unless both are the same."""
    return "+".join(map(str, ranks.values() if len(set(ranks.values())) > 1 else list(ranks.values())[:1])) or "?"


def _parameters(result: TrainResult) -> str:
    total = _millions(result.trainable_parameters)
    parts = " + ".join(f"{part} {_millions(number)}" for part, number in result.parameters.items())
    return f"{total} ({parts})" if len(result.parameters) > 1 else total


def _millions(number: int) -> str:
    return f"{number / 1e6:.2f}M"
