"""The numbers behind a picture: the same rows are drawn and written as CSV, so that the two cannot differ."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import NamedTuple

from engine_patch.store.atomic import atomic_write
from preft_cli.bench.numbers import ratio
from preft_cli.bench.published import NUM_ADAPTERS, SOURCE, published_for
from preft_cli.bench.results import ArmResult, BenchResult, Spread
from preft_cli.bench.sweep_result import SweepResult
from preft_cli.config.swept import Value

SPEED = "requests_per_second"
MEASURED = "measured"
LATENCIES = ("ttft", "tpot")
PERCENTILES = ("p50", "p90", "p99")


class Row(NamedTuple):
    """One mark of a picture."""

    quantity: str
    """`requests_per_second`, `ratio_to_base`, `ratio_to_lora`, `ttft_p99_ms`."""
    arm: str
    value: Value
    """Of the swept key; None outside of a sweep."""
    low: float
    median: float
    high: float
    source: str = MEASURED

    @property
    def measured(self) -> bool:
        """Or else published."""
        return self.source == MEASURED


def rows_of_result(result: BenchResult) -> list[Row]:
    """Everything that the picture of one result shows."""
    speeds = {name: arm.requests_per_second for name, arm in result.arms.items()}
    rows = _speeds_and_ratios(speeds, result.ratios, None)
    if result.config.bench.num_adapters == NUM_ADAPTERS:
        rows += _published(result.config.model.base, set(speeds), None)
    return rows + [row for name, arm in result.arms.items() for row in _latencies(name, arm)]


def rows_of_sweep(swept: SweepResult, model: str) -> list[Row]:
    """Everything that the picture of a sweep shows."""
    rows = []
    for point in swept.points:
        rows += _speeds_and_ratios(point.requests_per_second, point.ratios, point.value)
    if swept.key == "num_adapters":
        rows += _published(model, {row.arm for row in rows}, NUM_ADAPTERS)
    return rows


def _speeds_and_ratios(speeds: dict[str, Spread], ratios: dict[str, Spread], value: Value) -> list[Row]:
    rows = [_row(SPEED, arm, value, speed) for arm, speed in speeds.items()]
    for under in ("base", "lora"):
        found = {arm: ratio(ratios, arm, under) for arm in speeds if arm != under}
        rows += [_row(f"ratio_to_{under}", arm, value, one) for arm, one in found.items() if one is not None]
    return rows


def _published(model: str, arms: set[str], value: Value) -> list[Row]:
    """Published ratios, of the arms that were measured, where LoRA was too."""
    found = published_for(model) if "lora" in arms else {}
    return [Row("ratio_to_lora", arm, value, one, one, one, SOURCE) for arm, one in found.items() if arm in arms]


def _latencies(name: str, arm: ArmResult) -> list[Row]:
    """Percentiles with their range over the repetitions; none outside of `bench.mode: online`."""
    found = {(of, at): arm.latency(of, at) for of in LATENCIES for at in PERCENTILES}
    return [_row(f"{of}_{at}_ms", name, None, one) for (of, at), one in found.items() if one is not None]


def _row(quantity: str, arm: str, value: Value, spread: Spread) -> Row:
    return Row(quantity, arm, value, spread.low, spread.median, spread.high)


def write_csv(rows: list[Row], path: Path, key: str | None = None) -> None:
    """Write the rows; `key` heads the column of the swept value, which a single result does not have."""
    titles = ["quantity", "arm", *([key] if key else []), "low", "median", "high", "source"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(titles)
    for row in rows:
        value = [row.value] if key else []
        writer.writerow([row.quantity, row.arm, *value, row.low, row.median, row.high, row.source])
    atomic_write(path, [text.getvalue().encode()])
