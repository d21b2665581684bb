"""The picture of a sweep: held-out loss over rank and over trainable parameters, a line a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from preft_cli.bench.plot_style import COLOURS, FAINT, INK, MARKERS, figure, machine, tidy
from preft_cli.training.sweep.result import Point, SweepResult

# Further colours after Okabe and Ito for methods that no benchmark has.
METHOD_COLOURS = {**COLOURS, "lorap+direftp": "#56b4e9", "lora+direft": "#d55e00"}
METHOD_MARKERS = {**MARKERS, "lorap+direftp": "P", "lora+direft": "X"}
STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
"""Of lines of the same method, in turn."""


MOST_EMPTY = 1.5
"""The base model's line may lie as many times the height of all others above them."""


BELOW = {"ha": "right", "va": "top", "color": FAINT, "fontsize": 8.5}
"""A text at the right end of a line."""


class Mark(NamedTuple):
    """One point of a line."""

    x: float
    mean: float
    low: float
    high: float
    at_edge: bool


def lines_of(points: list[Point], x: Callable[[Point], float | None]) -> dict[str, list[Mark]]:
    """The marks of each line from left to right; points without losses have none."""
    lines: dict[str, list[Mark]] = {}
    for point in points:
        place, loss = x(point), point.held_out
        if place is not None and loss is not None:
            mark = Mark(place, loss.mean, loss.low, loss.high, bool(point.at_edge))
            lines.setdefault(point.line, []).append(mark)
    return {line: sorted(marks) for line, marks in lines.items()}


def picture_of(swept: SweepResult) -> Any:
    """A figure of two panels."""
    made = figure(10, 4.8)
    left, right = made.subplots(1, 2, sharey=True)
    looks = looks_of(_methods(swept.points))
    ranks = sorted({point.rank for point in swept.points})
    _panel(left, swept, lines_of(swept.points, lambda point: point.rank), looks)
    _panel(right, swept, lines_of(swept.points, lambda point: point.trainable_parameters), looks)
    tidy(left, "Held-out loss over rank")
    tidy(right, "Held-out loss over trainable parameters")
    left.set_xscale("log", base=2)
    left.set_xticks(ranks, list(map(str, ranks)))
    left.minorticks_off()
    right.set_xscale("log")
    _label_sizes(right)
    left.set_xlabel("rank", fontsize=9.5)
    right.set_xlabel("trainable parameters", fontsize=9.5)
    left.set_ylabel("nats per completion token", fontsize=9.5)
    _show_differences(left, swept)
    made.legend(*left.get_legend_handles_labels(), fontsize=9, frameon=False, loc="outside right center")
    made.suptitle(title(swept), x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    made.supxlabel(foot(swept), x=0.01, ha="left", fontsize=8.5, color=FAINT)
    return made


def _label_sizes(axes: Any) -> None:
    """Ticks such as 500k and 2M in place of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.minorticks_off()


def size_text(number: float) -> str:
    """A number of parameters: `500`, `20k`, `2M`."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:g}{letter}"
    return f"{number:g}"


def _show_differences(axes: Any, swept: SweepResult) -> None:
    """Move the base model's line down where it would press those of the methods into one, and say so."""
    losses = [point.held_out for point in swept.points if point.held_out]
    low, high = min((loss.low for loss in losses), default=0.0), max((loss.high for loss in losses), default=0.0)
    span = max(high - low, 0.02 * high)
    if swept.base is not None and swept.base > high + MOST_EMPTY * span:
        axes.set_ylim(low - 0.1 * span, high + 0.3 * span)
        for panel in axes.figure.axes:
            panel.axhline(high + 0.22 * span, color=COLOURS["base"], linestyle="--", linewidth=1.3)
            text = f"base model: {swept.base:.2f}, not to scale"
            panel.annotate(text, (0.99, high + 0.2 * span), xycoords=panel.get_yaxis_transform(), **BELOW)


def looks_of(lines: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line style by line, from its method: the method's, and a style of its own among those of a method."""
    looks: dict[str, dict[str, Any]] = {}
    of_method: dict[str, int] = {}
    for line, method in lines.items():
        number = of_method[method] = of_method.get(method, -1) + 1
        looks[line] = {
            "color": METHOD_COLOURS[method],
            "marker": METHOD_MARKERS[method],
            "linestyle": STYLES[number % len(STYLES)],
        }
    return looks


def _methods(points: list[Point]) -> dict[str, str]:
    """By line, the method of its first point: a line "best method" has several."""
    methods: dict[str, str] = {}
    for point in points:
        methods.setdefault(point.line, point.method)
    return methods


def _panel(axes: Any, swept: SweepResult, lines: dict[str, list[Mark]], looks: dict[str, dict[str, Any]]) -> None:
    if swept.base is not None:
        label = f"base model: {swept.base:.2f}"
        axes.axhline(swept.base, color=COLOURS["base"], linestyle="--", linewidth=1.3, label=label)
    for line, marks in lines.items():
        around = [[mark.mean - mark.low for mark in marks], [mark.high - mark.mean for mark in marks]]
        means, places = [mark.mean for mark in marks], [mark.x for mark in marks]
        axes.errorbar(places, means, yerr=around, label=line, capsize=3, linewidth=1.8, markersize=5.5, **looks[line])
    hollow = [(mark, line) for line, marks in lines.items() for mark in marks if mark.at_edge]
    for mark, line in hollow:
        look = {"mfc": "white", "mec": looks[line]["color"], "marker": looks[line]["marker"]}
        axes.plot(mark.x, mark.mean, linestyle="", mew=1.5, markersize=6, zorder=5, **look)
    if hollow:
        label = f"best {', '.join(swept.choose)} at the edge of those tried"
        axes.plot([], [], "o", mfc="white", mec=FAINT, mew=1.5, markersize=6, label=label)


def title(swept: SweepResult) -> str:
    """`SmolLM2-135M-Instruct, 1 x NVIDIA H200, 2026-05-14`."""
    device = next((cell.device for cell in swept.cells if cell.device), "cpu")
    return f"{Path(swept.base_model).name}, {machine(swept.hardware, device)}, {swept.created:%Y-%m-%d}"


def foot(swept: SweepResult) -> str:
    """What was measured, in one or two lines."""
    seeds = sorted({cell.seed for cell in swept.cells})
    rows = next((cell.held_out.rows for cell in swept.cells if cell.held_out), 0)
    steps = sorted({cell.steps for cell in swept.cells if cell.steps})
    train = swept.config["train"]
    measured_on = f"{train['file']}, {rows} held-out rows"
    if swept.measure == "accuracy":
        measured_on = f"{train['grpo']['environment'] or train['file']}, {rows} held-out problems"
    told = [
        measured_on,
        f"{steps[0]} steps" if len(steps) == 1 else f"{steps[0]} to {steps[-1]} steps" if steps else "",
        f"mean and range of {len(seeds)} seeds" if len(seeds) > 1 else "one seed",
        f"{', '.join(swept.choose)} chosen on validation rows" if swept.choose else "",
        f"{len(swept.failed)} of {len(swept.cells)} runs failed" if swept.failed else "",
    ]
    return ", ".join(filter(None, told))
