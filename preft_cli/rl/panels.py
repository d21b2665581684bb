"""The panels of an RL run's picture, one function each. `rows` are those of kind train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from preft_cli.bench.plot_style import FAINT, INK, tidy
from preft_cli.rl.accuracy import Accuracy, HeldOutAccuracy
from preft_cli.rl.summary import PARTS
from preft_cli.rl.watch import GAP_LIMIT

Rows = Sequence[dict[str, Any]]

BLUE, ORANGE, GREEN, PINK, GREY = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#bbbbbb"
PART_COLOURS = {"generation": BLUE, "training": ORANGE, "rewards": GREEN, "sync": PINK, "rest": GREY}
LINE = {"linewidth": 1.5}
LEGEND = {"fontsize": 8, "frameon": False, "handlelength": 1.2, "columnspacing": 1.0, "borderpad": 0.1}
ABOVE = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2}
"""Between the panel and its title: inside, lines on two axes would run through a legend."""


def series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps and values where there is a finite one."""
    known = [(row["step"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    return [step for step, _ in known], [value for _, value in known]


def draw(axes: Any, rows: Rows, key: str, label: str, colour: str, **look: Any) -> None:
    """One line, if there is anything to draw."""
    steps, values = series(rows, key)
    if steps:
        axes.plot(steps, values, color=colour, label=label, **(LINE | look))


def rewards(axes: Any, rows: Rows, measured: Rows, held_out: HeldOutAccuracy | None) -> None:
    """The mean reward in a band of one standard deviation, and held-out accuracies with their intervals."""
    known = [row for row in rows if row.get("reward_mean") is not None and row.get("reward_std") is not None]
    if known:
        steps, means = [row["step"] for row in known], [row["reward_mean"] for row in known]
        # No reward lies beyond the lowest and the highest one.
        low = [max(row["reward_mean"] - row["reward_std"], row["reward_low"]) for row in known]
        high = [min(row["reward_mean"] + row["reward_std"], row["reward_high"]) for row in known]
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0)
        axes.plot(steps, means, color=BLUE, label="reward, std", **LINE)
    marks = {row["step"]: Accuracy.of(row["right"], row["total"]) for row in measured}
    if marks:
        bars = ([one.value - one.low for one in marks.values()], [one.high - one.value for one in marks.values()])
        values = [one.value for one in marks.values()]
        look = {"color": ORANGE, "marker": "o", "markersize": 5, "linestyle": ":", "capsize": 3}
        axes.errorbar(list(marks), values, yerr=bars, label="accuracy, 95% interval", zorder=5, **look)
    if held_out and held_out.constant:
        label = f"always {held_out.constant.answer[:20]!r}"
        axes.axhline(held_out.constant.accuracy.value, color=FAINT, linestyle="--", linewidth=1.2, label=label)
    _finish(axes, "Reward and held-out accuracy", "reward; share solved")


def groups(axes: Any, rows: Rows) -> None:
    draw(axes, rows, "tied_share", "groups whose answers tie", PINK)
    draw(axes, rows, "solved_share", "answers that solve", GREEN)
    axes.set_ylim(-0.03, 1.03)
    _finish(axes, "Groups without signal", "share")


def entropy(axes: Any, rows: Rows) -> None:
    draw(axes, rows, "entropy", "entropy", BLUE)
    axes.set_ylim(bottom=0)
    if series(rows, "kl")[0]:
        _second(axes, rows, "kl", "KL from the base model", "KL, nats per token")
    _finish(axes, "Entropy and KL", "entropy, nats per token")


def lengths(axes: Any, rows: Rows) -> None:
    draw(axes, rows, "length_mean", "mean length", BLUE)
    axes.set_ylim(bottom=0)
    second = _second(axes, rows, "cut_share", "answers cut", "share cut")
    second.set_ylim(-0.03, 1.03)
    _finish(axes, "Length of answers", "tokens")


def ratios(axes: Any, rows: Rows) -> None:
    draw(axes, rows, "ratio_mean", "importance ratio", BLUE)
    axes.axhline(1, color=FAINT, linestyle="--", linewidth=1)
    values = series(rows, "ratio_mean")[1]
    if values:  # never so close that rounding looks like a deviation
        far = max(0.05, *(1.2 * abs(value - 1) for value in values))
        axes.set_ylim(1 - far, 1 + far)
    _second(axes, rows, "clip_ratio", "clipped", "share of tokens clipped").set_ylim(bottom=0)
    _finish(axes, "Importance ratio and clipping", "trainer / engine, mean")


def gaps(axes: Any, rows: Rows) -> None:
    draw(axes, rows, "logprob_gap_mean", "mean", BLUE)
    draw(axes, rows, "logprob_gap_max", "largest", ORANGE)
    label = f"warns if the mean is above {GAP_LIMIT:g}"
    axes.axhline(GAP_LIMIT, color=FAINT, linestyle="--", linewidth=1, label=label)
    axes.set_yscale("log")
    _finish(axes, "Log-probabilities: |trainer - engine|", "nats per token")


def seconds(axes: Any, rows: Rows) -> None:
    """Stacked; what is no part's is the rest."""
    timed = [row for row in rows if row.get("seconds_total") is not None]
    parts = {part: [row.get(f"seconds_{part}") or 0.0 for row in timed] for part in PARTS}
    known = [sum(values) for values in zip(*parts.values(), strict=True)]
    parts["rest"] = [max(0.0, row["seconds_total"] - inside) for row, inside in zip(timed, known, strict=True)]
    names = list(PART_COLOURS)
    if timed:
        colours = [PART_COLOURS[name] for name in names]
        steps = [row["step"] for row in timed]
        axes.stackplot(steps, *(parts[name] for name in names), labels=names, colors=colours, alpha=0.85, step="mid")
    axes.set_ylim(bottom=0)
    _finish(axes, "Time of a step", "seconds")


def syncs(axes: Any, rows: Rows) -> None:
    sent = [row for row in rows if row.get("sync_bytes")]
    steps, times = series(sent, "seconds_sync")
    label = f"sync, {max(row['sync_bytes'] for row in sent) / 1e6:.1f} MB" if sent else None
    axes.plot(steps, [1000 * time for time in times], ".", color=PINK, markersize=5, label=label)
    axes.set_ylim(bottom=0)
    _second(axes, rows, "tokens_per_s", "sampling", "tokens/s").set_ylim(bottom=0)
    axes.yaxis.label.set_color(PINK)
    _finish(axes, "Weight sync and speed of sampling", "milliseconds")


def _second(axes: Any, rows: Rows, key: str, label: str, unit: str) -> Any:
    """A line on an axis of its own at the right, in the colour of that axis."""
    second = axes.twinx()
    draw(second, rows, key, label, ORANGE)
    second.set_ylabel(unit, fontsize=9, color=ORANGE)
    second.tick_params(labelsize=8.5, length=3, colors=ORANGE)
    second.spines[["top", "left", "right", "bottom"]].set_visible(False)
    axes.yaxis.label.set_color(BLUE)
    # The legend of both.
    axes.plot([], [], color=ORANGE, label=label, **LINE)
    return second


def _finish(axes: Any, title: str, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    tidy(axes, title)
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=20)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    named = axes.get_legend_handles_labels()[0]
    if named:
        axes.legend(**LEGEND, **ABOVE, ncols=len(named)).set_in_layout(False)  # or a wide one narrows its column
