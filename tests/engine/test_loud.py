"""The run of `tests.loud`, small, on the CPU engine, and beside it one with a fault planted, which is noticed.

The other faults are planted by hand: `python -m tests.loud --requests 80 --adapters 16 --mutation all-tokens`, and so on.
"""

from __future__ import annotations

import pytest

from engine_patch.rule import METHODS
from tests.loud import Run

pytestmark = pytest.mark.engine


def test_mixed_requests_end_with_no_error_and_no_wrong_adapter_and_swapped_adapters_are_noticed() -> None:
    """Both at a time, each on one core."""
    right, swapped = (
        Run("--requests", 120, "--adapters", 24),
        Run("--requests", 80, "--adapters", 16, "--mutation", "swap"),
    )
    status, report = right.end()
    assert (status, report["misses"], report["requests"]) == (0, 0, 120), report["said"]
    assert set(report["tokens_by_method"]) == {*METHODS, "base"}
    assert report["aborted"] > 0
    assert report["evictions"] > 20
    assert report["mixed_steps"] > 50
    # What a mix-up would change is far above what rounding does.
    assert report["largest_deviation"] < report["bound"] / 2
    assert min(report["nearest_wrong"], report["nearest_wrong_positions"]) > 10 * report["bound"]
    status, report = swapped.end()
    assert status == 1
    # Answers differ from the reference; no request ended early, and no answer proves nothing.
    assert report["misses"] == report["wrong_answers"] >= report["wrong_texts"] > 0, report["said"]
