"""The result of a benchmark: what is written as JSON and read back."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from engine_patch.store.atomic import atomic_write
from preft_cli.config.schema import PreftConfig

SCHEMA_VERSION = 1


class Record(BaseModel):
    """Base of all records: no unknown keys, no changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(Record):
    """Median and range of repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    def over(self, other: Spread) -> Spread:
        """Ratio of two spreads. The range is the widest that any two repetitions give: arms ran at different times."""
        return Spread(median=self.median / other.median, low=self.low / other.high, high=self.high / other.low)


class Repetition(Record):
    """One timed pass over all requests."""

    seconds: float
    requests: int
    tokens_asked: int
    tokens_produced: int
    failures: int

    @property
    def requests_per_second(self) -> float:
        """Good answers a second."""
        return (self.requests - self.failures) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second."""
        return self.tokens_produced / self.seconds


class AdapterSet(Record):
    """The adapter files of an arm."""

    format: str
    count: int
    rank: int
    bytes: int
    """Size of all files."""
    weights_digest: str
    """SHA-256 over all weights, whatever the form and method of the files: equal for arms with the same adapters."""


class WorkerResult(Record):
    """What an arm's process reports."""

    arm: str
    requests_digest: str
    """Of the requests as the process read them."""
    start_seconds: float
    """From the call of `vllm.LLM` to its return."""
    engine: dict[str, Any]
    """Settings as the engine resolved them."""
    patch: list[dict[str, Any]]
    """Status of preft's engine plugin in each worker; empty for the stock engine."""
    repetitions: list[Repetition] = Field(min_length=1)
    failed: list[str]
    """The first failures, in words."""


class ArmResult(WorkerResult):
    """One arm: how it was set up, and what came out."""

    description: str
    engine_args: dict[str, Any]
    environment: dict[str, str | None]
    adapters: AdapterSet | None
    requests_per_second: Spread
    output_tokens_per_second: Spread
    seconds: Spread
    failures: int
    log: str
    """Name of the log file, beside the result."""


class Hardware(Record):
    """The machine."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_gib: float
    gpus: list[str]


class BenchResult(Record):
    """The whole benchmark."""

    schema_version: int = SCHEMA_VERSION
    created: datetime
    config: PreftConfig
    """As resolved: defaults filled in, overrides applied."""
    model: str
    random_weights: bool
    device: str
    versions: dict[str, str]
    hardware: Hardware
    commit: str | None
    arms: dict[str, ArmResult]
    ratios: dict[str, Spread]
    """Requests a second of one arm over another's: `"lorap/base"`."""
    failures: int
    notes: list[str]
    path: Path | None = Field(None, exclude=True)
    """Where the result was written; not part of it."""


def ratios(arms: dict[str, Spread]) -> dict[str, Spread]:
    """Throughput ratios of every ordered pair of arms whose first is not the base arm."""
    return {
        f"{first}/{second}": arms[first].over(arms[second])
        for first in arms
        for second in arms
        if first not in (second, "base") and arms[second].low > 0
    }


def write_json(record: Record, path: Path) -> None:
    """Write aside and rename: a reader sees the old file or the whole new one."""
    atomic_write(path, [record.model_dump_json(indent=2).encode() + b"\n"])
