"""The result of a sweep: what is written as JSON beside the results of its values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from preft_cli.bench.load import load_result
from preft_cli.bench.results import BenchResult, Record, Spread
from preft_cli.config.swept import Value


class SweepPoint(Record):
    """What came out for one value."""

    value: Value
    file: str
    """The result, relative to the folder of the sweep's file; it is there unless `error` is set."""
    requests_per_second: dict[str, Spread]
    """By arm."""
    ratios: dict[str, Spread]
    failures: int
    error: str | None
    """Why there is no result."""


class SweepResult(Record):
    """The summary of a sweep."""

    schema_version: Literal[1] = 1
    key: str
    """Of the section `bench`."""
    values: list[Value]
    points: list[SweepPoint]
    """Those that ran, in the order of `values`."""
    path: Path | None = Field(None, exclude=True)
    """Where this was written; not part of it."""

    @property
    def failures(self) -> int:
        """Requests that failed, over all points; a point without a result counts as one."""
        return sum(point.failures + (point.error is not None) for point in self.points)

    def results(self) -> Iterator[tuple[SweepPoint, BenchResult]]:
        """The points that have a result, with it."""
        folder = self.path.parent if self.path else Path()
        for point in self.points:
            if point.error is None:
                yield point, load_result(folder / point.file)
