"""The picture of one result: throughput, ratios over LoRA, and latencies where users were simulated."""

from __future__ import annotations

from typing import Any

from preft_cli.bench.drawn import LATENCIES, PERCENTILES, SPEED, Row
from preft_cli.bench.numbers import number
from preft_cli.bench.plot_style import COLOURS, FAINT, INK, PUBLISHED_LABEL, figure, head, tidy
from preft_cli.bench.results import BenchResult

LATENCY_TITLES = {
    "ttft": "Time to first token, ms (p50, p90, p99)",
    "tpot": "Time per output token, ms (p50, p90, p99)",
}


def picture_of_result(result: BenchResult, rows: list[Row]) -> Any:
    """A figure with one panel for each kind of row that there is."""
    arms = list(result.arms)
    over_lora = [row for row in rows if row.quantity == "ratio_to_lora"]
    latencies = [name for name in LATENCIES if any(row.quantity.startswith(name) for row in rows)]
    panels = 1 + bool(over_lora) + len(latencies)
    columns = min(panels, 2)
    lines = -(-panels // columns)
    height = (1.3 + 0.42 * len(arms)) * lines + 1.0
    made = figure(10, max(height, 3.6))
    panel = iter(made.subplots(lines, columns, squeeze=False, width_ratios=[1.15, 1][:columns]).flat)
    _speeds(next(panel), arms, rows)
    if over_lora:
        _ratios(next(panel), [arm for arm in arms if arm != "lora"], over_lora)
    for latency in latencies:
        _latency(next(panel), arms, latency, rows)
    for unused in panel:
        unused.set_axis_off()
    head(made, result, published=any(not row.measured for row in rows))
    return made


def _speeds(axes: Any, arms: list[str], rows: list[Row]) -> None:
    """Bars with whiskers from the slowest to the fastest repetition, and the ratio to base written on each."""
    speeds = {row.arm: row for row in rows if row.quantity == SPEED}
    to_base = {row.arm: row.median for row in rows if row.quantity == "ratio_to_base"}
    most = max(row.high for row in speeds.values()) or 1.0
    for place, arm in enumerate(arms):
        row = speeds[arm]
        around = [[row.median - row.low], [row.high - row.median]]
        axes.barh(place, row.median, height=0.62, color=COLOURS[arm])
        axes.errorbar(row.median, place, xerr=around, color=INK, elinewidth=1.2, capsize=3)
        ratio = f"   {to_base[arm]:.2f} x base" if arm in to_base else ""
        axes.text(row.high + most * 0.02, place, f"{number(row.median)}{ratio}", va="center", fontsize=9.5, color=INK)
    _arms_upward(axes, arms)
    axes.set_xlim(0, most * 1.38)
    tidy(axes, "Requests per second", grid="x")


def _ratios(axes: Any, arms: list[str], rows: list[Row]) -> None:
    """Dots with their range; published ones hollow."""
    axes.axvline(1, color=COLOURS["lora"], linewidth=1.5)
    axes.annotate(
        "lora", (1, len(arms) - 0.4), (5, 4), textcoords="offset points", color=COLOURS["lora"], weight="bold"
    )
    label: str | None = PUBLISHED_LABEL
    for row in rows:
        place = arms.index(row.arm)
        colour = COLOURS[row.arm]
        if row.measured:
            axes.plot([row.low, row.high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
            axes.plot(row.median, place, "o", color=colour, markersize=8)
            axes.annotate(
                f"{row.median:.2f}", (row.median, place), (0, 8), textcoords="offset points", ha="center", color=INK
            )
        else:
            axes.plot(row.median, place, "D", mfc="white", mec=colour, mew=1.6, markersize=8, label=label)
            axes.annotate(
                f"{row.median:.2f}", (row.median, place), (0, -16), textcoords="offset points", ha="center", color=FAINT
            )
            label = None
    _arms_upward(axes, arms)
    axes.margins(x=0.12)
    tidy(axes, "Requests per second over lora", grid="x")
    if label is None:
        _hollow_legend(axes)


def _hollow_legend(axes: Any) -> None:
    """The published marks differ in colour as their arms do; what they share is being hollow."""
    legend = axes.legend(loc="best", fontsize=9, frameon=False, handletextpad=0.2)
    for handle in legend.legend_handles:
        handle.set_markeredgecolor(FAINT)


def _latency(axes: Any, arms: list[str], latency: str, rows: list[Row]) -> None:
    """From the median request to the slowest hundredth, a line an arm."""
    found = {(row.arm, row.quantity): row.median for row in rows}
    values: list[float] = []
    for place, arm in enumerate(arms):
        marks = [found[arm, f"{latency}_{percentile}_ms"] for percentile in PERCENTILES]
        axes.plot(marks, [place] * 3, color=COLOURS[arm], linewidth=1.5)
        for value, marker, size in zip(marks, "o|d", (8, 12, 7), strict=True):
            axes.plot(value, place, marker, color=COLOURS[arm], markersize=size, mew=2)
        axes.annotate(
            number(marks[0]), (marks[0], place), (0, 8), textcoords="offset points", ha="center", fontsize=9, color=INK
        )
        axes.annotate(
            number(marks[2]), (marks[2], place), (8, 0), textcoords="offset points", va="center", fontsize=9, color=INK
        )
        values += marks
    if min(values) > 0 and max(values) / min(values) > 20:
        axes.set_xscale("log")
        axes.margins(x=0.2)
    else:
        axes.set_xlim(0, max(values) * 1.18)
    _arms_upward(axes, arms)
    tidy(axes, LATENCY_TITLES[latency], grid="x")


def _arms_upward(axes: Any, arms: list[str]) -> None:
    """The first arm on top, as in the table."""
    axes.set_yticks(range(len(arms)), arms)
    axes.set_ylim(len(arms) - 0.4, -0.7)
