"""What a trace says of copies and kernels."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.profile_copies import LARGE, summary


def kernel(start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "ts": start, "dur": end - start, "args": {}}


def copy(start: float, end: float, num_bytes: int = LARGE) -> dict[str, Any]:
    return {"ph": "X", "cat": "gpu_memcpy", "ts": start, "dur": end - start, "args": {"bytes": num_bytes}}


def test_a_copy_between_two_steps_is_a_gap_and_one_beside_a_step_is_none() -> None:
    step = [kernel(10_000, 12_000), kernel(12_010, 20_000), kernel(26_000, 30_000)]
    found = summary([*step, copy(13_000, 15_000), copy(20_000, 24_000), copy(20_500, 21_000, 64), {"ph": "M"}])
    assert found["long_gaps_ms"] == [{"gap": 6.0, "copying": 4.0}]
    assert (found["copies"], found["copying_s"], found["copying_beside_kernels_s"]) == (2, 0.006, 0.002)
    assert (found["kernels_s"], found["seconds"]) == (0.014, 0.02)
