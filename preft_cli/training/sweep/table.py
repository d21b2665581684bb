"""The numbers behind the picture of a sweep, as CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from engine_patch.store.atomic import atomic_write
from preft_cli.training.sweep.names import value_text
from preft_cli.training.sweep.result import Point, SweepResult

COLUMNS = ("line", "method", "rank", "trainable_parameters")
MEASURED = ("seeds", "held_out_mean", "held_out_low", "held_out_high", "base", "at_edge", "failed")


def write_csv(swept: SweepResult, path: Path) -> None:
    """A row for each point."""
    # The first ones have columns of their own, and seeds are what the mean is over.
    keys = [key for key in swept.swept if key not in ("adapter.method", "adapter.rank", "project.seed")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    constant = {"constant": swept.constant.accuracy.value} if swept.constant else {}
    writer.writerow([*COLUMNS, *keys, *MEASURED, *constant])
    for point in swept.points:
        writer.writerow([*_row(point, keys, swept.base), *constant.values()])
    atomic_write(path, [text.getvalue().encode()])


def _row(point: Point, keys: list[str], base: float | None) -> list[object]:
    values = {**point.settings, **point.chosen}
    held_out = point.held_out
    return [
        point.line,
        point.method,
        point.rank,
        point.trainable_parameters,
        *(value_text(values[key]) if key in values else "" for key in keys),
        len(held_out.by_seed) if held_out else 0,
        *((held_out.mean, held_out.low, held_out.high) if held_out else ("", "", "")),
        base,
        " ".join(point.at_edge),
        len(point.failed),
    ]
