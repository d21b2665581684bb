"""Pictures beside results: `bench.png`, and the numbers drawn in `bench.csv`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from preft_cli.bench.drawn import Row, rows_of_result, rows_of_sweep, write_csv
from preft_cli.bench.results import BenchResult
from preft_cli.bench.sweep_result import SweepResult
from preft_cli.console import say


def plot_result(result: BenchResult) -> None:
    """Draw one result beside its file."""
    from preft_cli.bench.plot_result import picture_of_result

    if result.path is not None:
        rows = rows_of_result(result)
        _write(result.path, rows, None, lambda: picture_of_result(result, rows))


def plot_sweep(swept: SweepResult) -> None:
    """Draw a sweep beside its file; one without any result has nothing to draw."""
    from preft_cli.bench.plot_sweep import picture_of_sweep

    first = next((result for _, result in swept.results()), None)
    if first is not None and swept.path is not None:
        rows = rows_of_sweep(swept, first.config.model.base)
        _write(swept.path, rows, swept.key, lambda: picture_of_sweep(swept, first, rows))


def _write(beside: Path, rows: list[Row], key: str | None, draw: Callable[[], Any]) -> None:
    from preft_cli.bench.plot_style import save

    write_csv(rows, beside.with_suffix(".csv"), key)
    if find_spec("matplotlib") is None:
        say("note: no picture, for matplotlib is not installed: pip install 'preft[train]'")
        return
    save(draw(), beside.with_suffix(".png"))
    say(f"picture: {beside.with_suffix('.png')}, its numbers: {beside.with_suffix('.csv')}")
