"""The end of a run, for people."""

from __future__ import annotations

from rich.table import Table

from preft_cli.console import duration, err, say
from preft_cli.training.result import TrainResult


def print_result(result: TrainResult) -> None:
    """A table of the run and where each artefact lies, on stderr."""
    table = Table("trained", result.adapter)
    for name, value in _facts(result).items():
        table.add_row(name, value)
    err.print(table)
    # Outside of the table, which would cut paths to the terminal's width: they are there to be copied.
    width = max(map(len, result.artefacts))
    for name, path in result.artefacts.items():
        say(f"{name:<{width}}  {path}")


def _facts(result: TrainResult) -> dict[str, str]:
    facts = {
        "method": f"{result.method} on {result.base_model}, {result.trainable_parameters / 1e6:.2f}M parameters",
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
