"""The picture of a sweep: throughput and ratios over the swept value, a line an arm."""

from __future__ import annotations

from typing import Any

from preft_cli.bench.drawn import SPEED, Row
from preft_cli.bench.plot_style import COLOURS, FAINT, MARKERS, PUBLISHED_LABEL, figure, head, tidy
from preft_cli.bench.results import BenchResult
from preft_cli.bench.sweep_result import SweepResult
from preft_cli.config.swept import Value

DECADE = 10
"""Values that span more lie on a logarithmic axis."""


def picture_of_sweep(swept: SweepResult, first: BenchResult, rows: list[Row]) -> Any:
    """A figure of two panels; `first` says what was measured, and on what."""
    under = "lora" if any(row.quantity == "ratio_to_lora" for row in rows) else "base"
    ratios = [row for row in rows if row.quantity == f"ratio_to_{under}"]
    made = figure(10, 4.6)
    left, right = made.subplots(1, 2)
    _lines(left, swept, [row for row in rows if row.quantity == SPEED])
    left.set_ylim(bottom=0)
    tidy(left, "Requests per second")
    right.axhline(1, color=COLOURS[under], linewidth=1.5)
    right.annotate(
        under, (1, 1), (-4, 4), right.get_yaxis_transform(), "offset points", color=COLOURS[under], ha="right"
    )
    _lines(right, swept, ratios)
    _published(right, swept, ratios)
    right.set_ylim(bottom=min(0.9, 0.9 * min((row.low for row in ratios), default=1.0)))
    tidy(right, f"Requests per second over {under}")
    for axes in (left, right):
        axes.set_xlabel(swept.key, fontsize=9.5)
        _scale(axes, swept.values)
    left.legend(fontsize=9, frameon=False, loc="best")
    if any(not row.measured for row in ratios):
        right.legend(fontsize=9, frameon=False, loc="best", handletextpad=0.2)
    head(made, first, swept=swept.key, published=any(not row.measured for row in rows))
    return made


def _lines(axes: Any, swept: SweepResult, rows: list[Row]) -> None:
    """The median of each arm, in a band from the slowest to the fastest repetition."""
    for arm in dict.fromkeys(row.arm for row in rows if row.measured):
        marks = sorted((_place(swept, row.value), row) for row in rows if row.arm == arm and row.measured)
        places = [place for place, _ in marks]
        colour = COLOURS[arm]
        low, high = [row.low for _, row in marks], [row.high for _, row in marks]
        axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
        medians = [row.median for _, row in marks]
        label = arm if rows[0].quantity == SPEED else None
        axes.plot(places, medians, color=colour, marker=MARKERS[arm], markersize=5.5, linewidth=1.8, label=label)


def _published(axes: Any, swept: SweepResult, rows: list[Row]) -> None:
    """Hollow marks."""
    for row in rows:
        if not row.measured:
            place, colour = _place(swept, row.value), COLOURS[row.arm]
            axes.plot(place, row.median, MARKERS[row.arm], mfc="white", mec=colour, mew=1.6, markersize=9, zorder=5)
    if any(not row.measured for row in rows):
        axes.plot([], [], "D", mfc="white", mec=FAINT, mew=1.6, markersize=8, label=PUBLISHED_LABEL)


def _numeric(values: list[Value]) -> list[float]:
    """The values as numbers; empty if one of them is none."""
    return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _place(swept: SweepResult, value: Value) -> float:
    """Where the value lies on the axis: at itself, or words side by side."""
    if len(_numeric(swept.values)) == len(swept.values):
        return float(value)  # type: ignore[arg-type]
    return float(swept.values.index(value))


def _scale(axes: Any, values: list[Value]) -> None:
    """A tick at each measured value."""
    numbers = _numeric(values)
    if len(numbers) < len(values):
        axes.set_xticks(range(len(values)), [str(value) for value in values])
        axes.margins(x=0.15)
        return
    if min(numbers) > 0 and max(numbers) / min(numbers) > DECADE:
        axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(value) for value in values])
    axes.minorticks_off()
