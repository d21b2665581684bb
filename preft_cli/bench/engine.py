"""What a worker drives: an engine that answers sets of requests, in this process (offline) or behind a server (online)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from preft_cli.bench.results import Counters, Latency
from preft_cli.bench.workload import Request
from preft_cli.config.schema import LoadConfig


class EngineSpec(BaseModel):
    """All that a worker needs to know to start the engine of an arm."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arm: str
    mode: Literal["offline", "online"]
    engine_args: dict[str, Any]
    """Arguments of `vllm.LLM`, and by the same names of the server."""
    adapters: list[Path]
    """Empty: no adapters. A `.preft` file or a PEFT folder each; requests name them by position."""
    plugin: bool
    """Whether preft's engine plugin must be live."""
    residual_stream: bool = False
    """`model.residual_stream`."""
    all_token_adapters: bool = False
    """Whether the adapters act on decoded tokens too."""
    load: LoadConfig = LoadConfig()
    """How requests arrive; online only."""
    seed: int = 0
    """Of the arrival times; online only."""
    scratch: Path
    """A folder for files of this engine alone."""


class Answer(NamedTuple):
    """What came back for one request."""

    num_tokens: int
    finish_reason: str | None
    """`length` for an answer as long as asked; anything else in words for one that is not."""


class Answered(NamedTuple):
    """What came back for a set of requests."""

    seconds: float
    """From the first request to the last answer."""
    answers: list[Answer]
    """In the order of the requests."""
    counters: Counters
    """What the engine counted meanwhile."""
    latency: Latency | None


class Engine(Protocol):
    """A running engine."""

    settings: dict[str, Any]
    """As the engine resolved them from its arguments and defaults."""
    patch: list[dict[str, Any]]
    """Status of preft's plugin in each process of the engine; empty for the stock engine."""

    def answer(self, requests: list[Request], *, warm_up: bool = False) -> Answered:
        """Answer all of them, from an empty prefix cache, and time it; to warm up, as fast as they come."""

    def stop(self) -> None:
        """End it."""


def plugin_options(spec: EngineSpec) -> dict[str, Any]:
    """The plugin's own options: all adapters stay in host memory, as the stock engine's do."""
    needed = sum(path.stat().st_size for path in spec.adapters)
    return {
        "host_pool_bytes": max(needed, 1 << 30),
        "residual_stream": spec.residual_stream,
        "all_token_adapters": spec.all_token_adapters,
    }
