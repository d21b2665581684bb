"""The end of a sweep: files beside its `sweep.json`, and a table for people."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from preft_cli.bench.results import write_json
from preft_cli.console import out, say, warn
from preft_cli.training.measure import Measure
from preft_cli.training.sweep.names import short_names, value_text
from preft_cli.training.sweep.result import OverSeeds, Point, SweepResult
from preft_cli.training.sweep.table import write_csv

EDGE = "*"
SHOWN = 3
"""Failed runs by name."""


def write_files(swept: SweepResult, path: Path) -> None:
    """The result at `path`, its numbers as CSV and its picture beside it."""
    write_json(swept, path)
    write_csv(swept, path.with_suffix(".csv"))
    say(f"sweep: {path}, its numbers: {path.with_suffix('.csv')}")
    if not any(point.held_out for point in swept.points):
        return
    if find_spec("matplotlib") is None:
        say("note: no picture, for matplotlib is not installed: pip install 'preft[train]'")
        return
    from preft_cli.bench.plot_style import save
    from preft_cli.training.sweep.plot import picture_of
    from preft_cli.training.sweep.plot_accuracy import picture_of_accuracy

    draw = picture_of_accuracy if swept.measure == "accuracy" else picture_of
    save(draw(swept), path.with_suffix(".png"))
    say(f"picture: {path.with_suffix('.png')}")


def print_sweep(swept: SweepResult) -> None:
    """A row for each point, what failed, and what to know of the numbers."""
    out.print(table(swept))
    for note in swept.notes:
        say(f"note: {note}")
    if swept.failed:  # each was told when it failed
        names = ", ".join(cell.name for cell in swept.failed[:SHOWN]) + (", ..." if len(swept.failed) > SHOWN else "")
        warn(f"{len(swept.failed)} of {len(swept.cells)} runs failed: {names}; the reasons are in the sweep's JSON")
    edges = sorted({key for point in swept.points for key in point.at_edge})
    if edges:
        say(f"{EDGE} the best {', '.join(edges)} is the smallest or largest one tried: try values beyond it")


def table(swept: SweepResult) -> Table:
    """Means with their range over seeds, and the change from the base model."""
    short, measure = short_names(swept.swept), swept.measured
    chosen = [key for name in swept.choose for key in name.split(":")]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.add_column("method", overflow="fold")
    for heading in ["rank", "parameters", *(short[key] for key in chosen), measure.held_out, "change", "seeds"]:
        made.add_column(heading, justify="right", no_wrap=True)
    for name, value in _lines_below(swept):
        made.add_row(Text(name), "", "", *("" for _ in chosen), measure.text(value), "", "")
    lines = list(dict.fromkeys(point.line for point in swept.points))
    for point in sorted(swept.points, key=lambda one: lines.index(one.line)):
        made.add_row(*(Text(cell) for cell in _cells(point, chosen, swept)))
    return made


def _lines_below(swept: SweepResult) -> list[tuple[str, float]]:
    """What the methods must be better than."""
    base = [] if swept.base is None else [("base", swept.base)]
    return base + ([(f"always {swept.constant.answer!r}", swept.constant.accuracy.value)] if swept.constant else [])


def _cells(point: Point, chosen: list[str], swept: SweepResult) -> list[str]:
    return [
        point.line,
        str(point.rank),
        _parameters(point.trainable_parameters),
        *(_chosen(point, key) for key in chosen),
        over_seeds(swept.measured, point.held_out),
        swept.measured.change(point.held_out.mean, swept.base) if point.held_out and swept.base is not None else "-",
        _seeds(point),
    ]


def _parameters(number: int | None) -> str:
    """`2.44M`, and `0.8k` of a toy."""
    if number is None:
        return "-"
    return f"{number / 1e6:.2f}M" if number >= 1e5 else f"{number / 1e3:.1f}k"


def _chosen(point: Point, key: str) -> str:
    if key not in point.chosen:
        return "none"
    return value_text(point.chosen[key]) + (EDGE if key in point.at_edge else "")


def _seeds(point: Point) -> str:
    """How many the mean is over, and how many runs it lacks."""
    done = len(point.held_out.by_seed) if point.held_out else 0
    return f"{done}, {len(point.failed)} failed" if point.failed else str(done)


def over_seeds(measure: Measure, values: OverSeeds | None) -> str:
    """`3.051 (3.020-3.088)`; without a range for one seed."""
    if values is None:
        return "-"
    around = f" ({measure.text(values.low)}-{measure.text(values.high)})" if len(values.by_seed) > 1 else ""
    return f"{measure.text(values.mean)}{around}"
