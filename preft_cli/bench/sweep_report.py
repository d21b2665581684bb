"""The end of a sweep, for people."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from preft_cli.bench.numbers import number, ratio
from preft_cli.bench.results import Spread
from preft_cli.bench.sweep_result import SweepPoint, SweepResult
from preft_cli.console import out, say, warn


def print_sweep(swept: SweepResult) -> None:
    """Print a row a value, what failed, and where the summary lies."""
    out.print(table(swept))
    for point in swept.points:
        if point.error is not None:
            warn(f"{swept.key}={point.value}: {point.error}")
        if point.failures:
            warn(f"{swept.key}={point.value}: {point.failures} requests failed: these numbers are not to be used")
    if swept.path is not None:
        say(f"sweep: {swept.path}")


def table(swept: SweepResult) -> Table:
    """Medians; narrow enough for 80 columns with all five arms."""
    arms = list(dict.fromkeys(arm for point in swept.points for arm in point.requests_per_second))
    others = [arm for arm in arms if arm != "base"]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.add_column(swept.key, overflow="fold")
    # Two lines a heading: the arm, and what is said of it.
    for heading in [f"{arm}\nreq/s" for arm in arms] + [f"{arm}\n/base" for arm in others]:
        made.add_column(heading, justify="right", no_wrap=True)
    for point in swept.points:
        made.add_row(*(Text(cell) for cell in _cells(point, arms, others)))
    return made


def _cells(point: SweepPoint, arms: list[str], others: list[str]) -> list[str]:
    speeds = [_median(point.requests_per_second.get(arm)) for arm in arms]
    return [str(point.value), *speeds, *(_median(ratio(point.ratios, arm, "base")) for arm in others)]


def _median(value: Spread | None) -> str:
    return "-" if value is None else number(value.median)
