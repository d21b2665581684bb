"""The run of `tests.loud`, small, on the CPU engine; and faults that are planted in it are noticed."""

from __future__ import annotations

import pytest

from engine_patch.rule import METHODS
from tests.loud import Run

pytestmark = pytest.mark.engine


def test_150_mixed_requests_end_with_no_error_and_no_wrong_adapter() -> None:
    status, report = Run("--requests", 150, "--adapters", 24).end()
    assert (status, report["misses"], report["requests"]) == (0, 0, 150), report["said"]
    assert set(report["tokens_by_method"]) == {*METHODS, "base"}
    assert report["aborted"] > 0
    assert report["evictions"] > 20
    assert report["mixed_steps"] > 50
    # What a mix-up would change is far above what rounding does.
    assert report["largest_deviation"] < report["bound"] / 2
    assert min(report["nearest_wrong"], report["nearest_wrong_positions"]) > 10 * report["bound"]


@pytest.mark.parametrize("faults", [("swap", "no-tokens"), ("all-tokens", "early")])
def test_planted_faults_are_noticed(faults: tuple[str, ...]) -> None:
    """Two at a time, each on one core."""
    runs = [Run("--requests", 80, "--adapters", 16, "--mutation", fault) for fault in faults]
    for fault, run in zip(faults, runs, strict=True):
        status, report = run.end()
        assert status == 1, fault
        # Answers differ from the reference; no request ended early, and no answer proves nothing.
        assert report["misses"] == report["wrong_answers"] >= report["wrong_texts"] > 0, report["said"]
