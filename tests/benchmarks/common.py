"""What the benchmarks share: who measured, how ratios are told, where the result goes."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from preft_cli.bench.machine import commit, hardware, versions

SCHEMA_VERSION = 1

RATIOS_SAID = (
    "median: of the ratios of all repetitions of all cases; both sides of a repetition were measured one after the other,"
    " the first in turn. low, high: the lowest and highest median of one case."
)


def about(benchmark: str, **settings: Any) -> dict[str, Any]:
    """The head of a result: what was run on what."""
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": benchmark,
        "device": device().type,
        "hardware": hardware().model_dump(),
        "versions": versions(),
        "commit": commit(),
        "settings": settings,
    }


def device() -> torch.device:
    """The GPU, or the CPU where there is none: there only the script is tried."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronise() -> None:
    """Wait for what is queued on the current stream."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_turn(sides: Mapping[str, Callable[[], float]], repetition: int) -> dict[str, float]:
    """Measure each side once; another one is the first each time."""
    names = list(sides)
    shift = repetition % len(names)
    return {name: sides[name]() for name in (*names[shift:], *names[:shift])}


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Repetition by repetition."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range of one case."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def over_cases(cases: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """See `RATIOS_SAID`; None if nothing was measured."""
    if not any(cases):
        return None
    medians = [statistics.median(case) for case in cases if case]
    every = [value for case in cases for value in case]
    return {"median": statistics.median(every), "low": min(medians), "high": max(medians)}


def say(text: str) -> None:
    """Progress for the person who waits."""
    print(text, file=sys.stderr, flush=True)


def write(out: Path | None, result: dict[str, Any]) -> None:
    """To the screen what matters, to `out` all of it."""
    shown = {key: result[key] for key in ("benchmark", "device", "ratios") if key in result}
    print(json.dumps(shown, indent=1))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
