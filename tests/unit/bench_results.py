"""Makes up results of `preft bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from preft_cli.bench.results import (
    AdapterSet,
    ArmResult,
    BenchResult,
    Counters,
    Hardware,
    Latency,
    Percentiles,
    Repetition,
    Spread,
    Started,
    write_json,
)
from preft_cli.config.schema import PreftConfig

REQUESTS = 10
TOKENS = 100
"""Of a repetition."""


def make_result(
    speeds: Mapping[str, Sequence[float]] | None = None,
    *,
    path: Path | None = None,
    config: PreftConfig | None = None,
    ttft_ms: float | None = None,
    **fields: Any,
) -> BenchResult:
    """A result whose arms had these requests a second, one a repetition. Written to `path` if there is one.

    `ttft_ms` is the median time to the first token of the slowest arm, for a result of `bench.mode: online`.
    """
    speeds = speeds or {"base": [10, 11, 9], "lora": [4, 5, 4.5], "lorap": [8, 9, 8.5]}
    config = config or make_config(arms=list(speeds))
    slowest = min(speeds, key=lambda name: max(speeds[name]))
    given = {name: None if ttft_ms is None else ttft_ms / (1 if name == slowest else 3) for name in speeds}
    made: dict[str, Any] = {
        "created": datetime(2026, 5, 14, 12, tzinfo=UTC),
        "seconds": 60.0,
        "command": ["preft", "bench"],
        "preset": None,
        "config": config,
        "model": config.model.base,
        "random_weights": config.model.base.startswith("random:"),
        "device": "cuda",
        "prefix_caching": config.bench.enable_prefix_caching,
        "versions": {"python": "3.12.0", "vllm": "0.32.0"},
        "hardware": Hardware(cpu="Made-up CPU", cores=2, memory_gib=8.0, gpus=["NVIDIA H200"]),
        "commit": "0123abc",
        "arms": {name: _arm(name, list(values), given[name]) for name, values in speeds.items()},
        "ratios": _ratios(speeds),
        "order": [name for _ in range(3) for name in speeds],
        "same_seed": dict.fromkeys(speeds, 1.0),
        "failures": 0,
        "notes": [],
    }
    result = BenchResult(**(made | fields), path=path)
    if path is not None:
        write_json(result, path)
    return result


def make_config(base: str = "random:llama-3.1-8b", **bench: Any) -> PreftConfig:
    """A config with these keys of its section `bench`."""
    return PreftConfig.model_validate({"model": {"base": base}, "bench": bench})


def _ratios(speeds: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """Of each arm to base, and to lora where it is none of the two."""
    pairs = [(over, under) for over in speeds for under in ("base", "lora") if over not in ("base", under)]
    return {
        f"{over}/{under}": Spread.of([a / b for a, b in zip(speeds[over], speeds[under], strict=True)])
        for over, under in pairs
        if under in speeds
    }


def _arm(name: str, speeds: list[float], ttft_ms: float | None) -> ArmResult:
    repetitions = [_repetition(number, speed, ttft_ms) for number, speed in enumerate(speeds)]
    adapters = AdapterSet(format="preft", count=8, ranks=[8], bytes=1000, weights_digest="0")
    return ArmResult(
        arm=name,
        description=name,
        variant=None,
        tried={},
        engine_args={},
        environment={},
        adapters=None if name == "base" else adapters,
        started=[Started(requests_digest="0", start_seconds=5.0, engine={}, patch=[])],
        repetitions=repetitions,
        again=[],
        requests_per_second=Spread.of([one.requests_per_second for one in repetitions]),
        output_tokens_per_second=Spread.of([one.tokens_per_second for one in repetitions]),
        seconds=Spread.of([one.seconds for one in repetitions]),
        preemptions=sum(one.counters.preemptions for one in repetitions),
        prefix_cache_hit_rate=0.0,
        adapter_loads=None,
        failures=0,
        failed=[],
        logs=[],
    )


def _repetition(number: int, speed: float, ttft_ms: float | None) -> Repetition:
    counters = Counters(
        preemptions=1, prompt_tokens=500, prefix_cache_queries=0, prefix_cache_hits=0, adapter_loads=None
    )
    return Repetition(
        number=number,
        seconds=REQUESTS / speed,
        requests=REQUESTS,
        tokens_asked=TOKENS,
        tokens_produced=TOKENS,
        failures=0,
        counters=counters,
        latency=None if ttft_ms is None else _latency(ttft_ms),
    )


def _latency(ttft_ms: float) -> Latency:
    def percentiles(p50: float) -> Percentiles:
        return Percentiles(mean=p50 * 1.1, p50=p50, p90=p50 * 2, p99=p50 * 3)

    step = percentiles(ttft_ms / 10)
    return Latency(
        ttft_ms=percentiles(ttft_ms), tpot_ms=step, itl_ms=step, e2el_ms=percentiles(ttft_ms * 9), goodput=None
    )
