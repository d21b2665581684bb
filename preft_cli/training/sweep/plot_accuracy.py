"""The picture of a sweep over RL runs: accuracies by method with their intervals, beside the learning curves."""

from __future__ import annotations

from typing import Any

from preft_cli.bench.plot_style import COLOURS, FAINT, INK, figure, tidy
from preft_cli.rl.accuracy import HeldOutAccuracy
from preft_cli.rl.plot import draw_accuracies, draw_rewards
from preft_cli.training.sweep.plot import foot, looks_of, title
from preft_cli.training.sweep.result import CellResult, Point, SweepResult
from preft_cli.training.sweep.summary import cells_of

SPREAD = 0.5
"""Of a method's place on the axis: what its seeds take of it."""

SHORT = 14
"""Characters that a line below a method may have."""


def picture_of_accuracy(swept: SweepResult) -> Any:
    """A figure of three panels."""
    drawn = {_label(point, swept): point for point in swept.points if point.held_out}
    looks = looks_of({label: point.method for label, point in drawn.items()})
    cells = {label: cells_of(point, swept.cells) for label, point in drawn.items()}
    made = figure(max(13.0, 10 + 1.1 * len(drawn)), 4.8)
    left, middle, right = made.subplots(1, 3, width_ratios=[max(1.2, 0.35 * len(drawn)), 1, 1])
    _accuracies(left, swept, drawn, cells, looks)
    curves = {label: [cell.curve for cell in of if cell.curve] for label, of in cells.items()}
    draw_rewards(middle, curves, looks)
    draw_accuracies(right, curves, looks)
    made.legend(*middle.get_legend_handles_labels(), fontsize=9, frameon=False, loc="outside right center")
    made.suptitle(title(swept), x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    made.supxlabel(f"{foot(swept)}; bars: 95% intervals of single runs", x=0.01, ha="left", fontsize=8.5, color=FAINT)
    return made


def _label(point: Point, swept: SweepResult) -> str:
    """The line, and the rank where several were tried."""
    ranks = {one.rank for one in swept.points}
    return f"{point.line}, rank {point.rank}" if len(ranks) > 1 else point.line


def _accuracies(
    axes: Any,
    swept: SweepResult,
    drawn: dict[str, Point],
    cells: dict[str, list[CellResult]],
    looks: dict[str, dict[str, Any]],
) -> None:
    """A short line at the mean of a method, and a mark with its interval for each of its seeds."""
    for place, (label, point) in enumerate(drawn.items()):
        assert point.held_out
        look = looks[label]
        axes.plot([place - 0.35, place + 0.35], [point.held_out.mean] * 2, color=look["color"], linewidth=2.2)
        measured = [cell.held_out.adapter for cell in cells[label] if isinstance(cell.held_out, HeldOutAccuracy)]
        for number, one in enumerate(measured):
            at = place + SPREAD * ((number + 0.5) / len(measured) - 0.5)
            around = [[one.value - one.low], [one.high - one.value]]
            mark = {"color": look["color"], "marker": look["marker"], "markersize": 5, "capsize": 2, "linewidth": 1}
            axes.errorbar(at, one.value, yerr=around, **mark)
    if base := swept.base_accuracy:
        axes.axhspan(base.base.low, base.base.high, color=COLOURS["base"], alpha=0.12, linewidth=0)
        _line(axes, base.base.value, f"base model: {base.base.value:.1%}", "--")
    if swept.constant:
        answer = swept.constant.answer[:20]
        _line(axes, swept.constant.accuracy.value, f"always {answer!r}: {swept.constant.accuracy.value:.1%}", ":")
    axes.set_xticks(range(len(drawn)), list(map(_broken, drawn)))
    axes.set_xlim(-0.6, len(drawn) - 0.4)
    axes.margins(y=0.06)  # marks at 0 and 1 are whole
    axes.set_ylabel(swept.measured.unit, fontsize=9.5)
    tidy(axes, "Held-out accuracy", grid="y")
    axes.legend(fontsize=8.5, frameon=False, loc="best")


def _broken(label: str) -> str:
    """In lines that do not run into the next label."""
    parts = label.split(", ")
    return "\n".join(part if len(part) < SHORT else part.replace(" ", "\n") for part in parts)


def _line(axes: Any, value: float, label: str, style: str) -> None:
    axes.axhline(value, color=COLOURS["base"], linestyle=style, linewidth=1.3, label=label)
