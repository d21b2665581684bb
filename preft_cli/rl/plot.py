"""RL runs as pictures: one run in small multiples, or several runs beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preft_cli.bench.plot_style import COLOURS, FAINT, INK, MARKERS, figure, save, tidy
from preft_cli.rl import panels
from preft_cli.rl.accuracy import HeldOutAccuracy
from preft_cli.rl.curve import LearningCurve

SMOOTHED = 20
"""Curves of rewards beside each other are running means over one such part of the steps."""

Curves = Mapping[str, Sequence[LearningCurve]]
"""By line, such as the method: a curve for each seed."""


def plot_run(
    rows: Sequence[dict[str, Any]], path: Path, title: str, held_out: HeldOutAccuracy | None = None, foot: str = ""
) -> None:
    """Draw what `Metrics.rows` hold of an RL run to a PNG. `foot` is a line below: the task, the machine."""
    save(picture_of_run(rows, title, held_out, foot), path)


def picture_of_run(
    rows: Sequence[dict[str, Any]], title: str, held_out: HeldOutAccuracy | None = None, foot: str = ""
) -> Any:
    """A figure of eight panels."""
    train = [row for row in rows if row["kind"] == "train"]
    measured = [row for row in rows if row["kind"] == "eval" and "accuracy" in row and row["split"] == "held-out"]
    made = figure(16, 7.6)
    (first, *upper), lower = made.subplots(2, 4)
    panels.rewards(first, train, sorted(measured, key=lambda row: int(row["step"])), held_out)
    further = (panels.groups, panels.entropy, panels.lengths, panels.ratios, panels.gaps, panels.seconds, panels.syncs)
    for panel, axes in zip(further, [*upper, *lower], strict=True):
        panel(axes, train)
    made.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    if foot:
        made.supxlabel(foot, x=0.01, ha="left", fontsize=8.5, color=FAINT)
    return made


def draw_rewards(axes: Any, runs: Curves, looks: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Rewards of the sampled answers by step, smoothed: single steps are noisy."""
    window = 1
    for line, curves in runs.items():
        window = max(1, max((len(curve.rewards) for curve in curves), default=0) // SMOOTHED)
        smooth = [running_mean(curve.rewards, window) for curve in curves]
        _band(axes, line, smooth, _look(line, looks) | {"marker": None})
    tidy(axes, "Reward while training")
    axes.set_ylabel("mean reward" + (f" (running mean of {window} steps)" if window > 1 else ""), fontsize=9.5)
    axes.set_xlabel("step", fontsize=9.5)


def draw_accuracies(axes: Any, runs: Curves, looks: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Held-out accuracies by step, from the base model's on."""
    for line, curves in runs.items():
        _band(axes, line, [curve.accuracies for curve in curves], _look(line, looks))
    tidy(axes, "Held-out accuracy while training")
    axes.set_ylabel("share of problems solved", fontsize=9.5)
    axes.set_xlabel("step", fontsize=9.5)


def running_mean(values: Mapping[int, float], window: int) -> dict[int, float]:
    """At each step the mean of the last `window` values; the first ones have fewer."""
    steps, numbers = list(values), list(values.values())
    return {step: statistics.fmean(numbers[max(0, at - window + 1) : at + 1]) for at, step in enumerate(steps)}


def _band(axes: Any, line: str, seeds: Sequence[Mapping[int, float]], look: Mapping[str, Any]) -> None:
    """The mean over seeds in a band from the lowest to the highest, where all seeds have a value."""
    steps = sorted(set.intersection(*(set(seed) for seed in seeds))) if seeds else []
    if not steps:
        return
    values = [[seed[step] for seed in seeds] for step in steps]
    if len(seeds) > 1:
        low, high = [min(at) for at in values], [max(at) for at in values]
        axes.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.plot(steps, [statistics.fmean(at) for at in values], label=line, linewidth=1.8, markersize=4.5, **look)


def _look(line: str, looks: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """As given, or that of the method that the line is named by."""
    method = line.partition(",")[0]
    return dict((looks or {}).get(line, {"color": COLOURS.get(method, INK), "marker": MARKERS.get(method, "o")}))
