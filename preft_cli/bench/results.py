"""The result of a benchmark: what is written as JSON and read back."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine_patch.store.atomic import atomic_write
from preft_cli.config.schema import PreftConfig

SCHEMA_VERSION: Literal[2] = 2


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


class Percentiles(Record):
    """Of one latency over the requests of a repetition, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Latency(Record):
    """What users of the server waited for; `bench.mode: online` only."""

    ttft_ms: Percentiles
    """Time to the first token."""
    tpot_ms: Percentiles
    """Time for each further token of a request, its mean."""
    itl_ms: Percentiles
    """Time between two tokens."""
    e2el_ms: Percentiles
    """From request to last token."""
    goodput: float | None
    """Requests a second within all limits of `bench.load.goodput`; None without limits."""


class Counters(Record):
    """What the engine counted during one repetition."""

    preemptions: int
    prompt_tokens: int
    prefix_cache_queries: int
    """Tokens looked up in the prefix cache."""
    prefix_cache_hits: int
    adapter_loads: dict[str, int] | None
    """Adapters that had to be brought into each tier (`device`, `host`), over all workers; None for the stock engine, which
    does not count them."""

    @classmethod
    def total(cls, counted: Sequence[Counters]) -> Counters:
        """All of them together."""
        loads: dict[str, int] | None = None
        for one in counted:
            if one.adapter_loads is not None:
                loads = {tier: (loads or {}).get(tier, 0) + count for tier, count in one.adapter_loads.items()}
        return cls(
            preemptions=sum(one.preemptions for one in counted),
            prompt_tokens=sum(one.prompt_tokens for one in counted),
            prefix_cache_queries=sum(one.prefix_cache_queries for one in counted),
            prefix_cache_hits=sum(one.prefix_cache_hits for one in counted),
            adapter_loads=loads,
        )


class Repetition(Record):
    """One timed pass over a set of requests."""

    number: int
    """Which set of requests; the same number is the same requests in every arm."""
    block: int = 0
    """Engines with the same number took turns: repetitions of one block are seconds apart."""
    seconds: float
    requests: int
    tokens_asked: int
    tokens_produced: int
    failures: int
    counters: Counters
    latency: Latency | None = None

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
    ranks: list[int]
    """Adapter i has rank `ranks[i % len(ranks)]`."""
    bytes: int
    """Size of all files."""
    weights_digest: str
    """SHA-256 over all weights, whatever the form and method of the files: equal for arms with the same adapters."""


class Started(Record):
    """What an engine says of itself once it is up."""

    requests_digest: str
    """Of the requests as the process read them."""
    start_seconds: float
    """From the call of `vllm.LLM` to its return, or from the server's start to its first good answer."""
    engine: dict[str, Any]
    """Settings as the engine resolved them."""
    patch: list[dict[str, Any]]
    """Status of preft's engine plugin in each process of the engine; empty for the stock engine."""


class EngineRun(Record):
    """What one engine did in one block."""

    started: list[Started]
    """One, or none if it was alive already."""
    repetitions: list[Repetition]
    again: list[Repetition]
    failures: int
    """Requests that failed, those of the warm-up among them."""
    failed: list[str]
    """The first failures, in words."""
    log: str


class BlockRun(Record):
    """What was measured in one block."""

    order: list[str]
    """Engines as they took turns."""
    engines: dict[str, EngineRun]


class ArmResult(Record):
    """One arm: how it was set up, and what came out."""

    arm: str
    description: str
    variant: str | None
    """Which settings of the arm these are, where several were tried; the best counts."""
    tried: dict[str, Spread]
    """Requests a second with each of the settings that were tried."""
    engine_args: dict[str, Any]
    environment: dict[str, str | None]
    adapters: AdapterSet | None
    started: list[Started] = Field(min_length=1)
    """One for each start of the engine."""
    repetitions: list[Repetition] = Field(min_length=1)
    again: list[Repetition]
    """The first requests of a block once more at its end: with the same work, the same time."""
    requests_per_second: Spread
    output_tokens_per_second: Spread
    seconds: Spread
    preemptions: int
    """In all timed repetitions."""
    prefix_cache_hit_rate: float
    """Share of the tokens looked up in the prefix cache that were there, over all timed repetitions."""
    adapter_loads: dict[str, int] | None
    """As `Counters.adapter_loads`, over all timed repetitions."""
    failures: int
    failed: list[str]
    """The first failures, in words."""
    logs: list[str]
    """Names of the log files, beside the result."""

    def latency(self, metric: str, statistic: str) -> Spread | None:
        """`ttft`, `tpot`, `itl` or `e2el`, and `mean`, `p50`, `p90` or `p99`, in ms; None outside of `bench.mode: online`."""
        seen = [one.latency for one in self.repetitions if one.latency]
        return Spread.of([getattr(getattr(one, f"{metric}_ms"), statistic) for one in seen]) if seen else None

    @property
    def goodput(self) -> Spread | None:
        """Requests a second within the limits of `bench.load.goodput`; None without limits."""
        seen = [one.latency.goodput for one in self.repetitions if one.latency and one.latency.goodput is not None]
        return Spread.of(seen) if seen else None


class Hardware(Record):
    """The machine."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_gib: float
    gpus: list[str]


class BenchResult(Record):
    """The whole benchmark."""

    schema_version: Literal[2] = SCHEMA_VERSION
    created: datetime
    seconds: float
    """All of it, with starts."""
    command: list[str]
    """The command line that made it."""
    preset: str | None
    config: PreftConfig
    """As resolved: defaults filled in, overrides applied."""
    model: str
    random_weights: bool
    device: str
    prefix_caching: bool
    versions: dict[str, str]
    hardware: Hardware
    commit: str | None
    arms: dict[str, ArmResult]
    ratios: dict[str, Spread]
    """Requests a second of one arm over another's: `"lorap/base"`. Each is the median, lowest and highest of the ratios of
    repetitions that lie beside each other."""
    order: list[str]
    """Arms in the order in which they were measured, one entry a repetition."""
    same_seed: dict[str, float]
    """Speed of the same requests the second time over the first, one value an arm; far from 1, something is warm or noisy."""
    failures: int
    notes: list[str]
    path: Path | None = Field(None, exclude=True)
    """Where the result was written; not part of it."""


def write_json(record: Record, path: Path) -> None:
    """Write aside and rename: a reader sees the old file or the whole new one."""
    atomic_write(path, [record.model_dump_json(indent=2).encode() + b"\n"])
