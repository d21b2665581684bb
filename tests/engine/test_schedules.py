"""The property: whatever the schedule, every log-probability equals the masked reference's; and planted faults are found.

By hand, with other seeds: `python -m tests.schedules --schedules 2000 --seed 10000`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from engine_patch import rule

pytestmark = pytest.mark.engine

SEED = 0


class Run:
    """`python -m tests.schedules` in a process of its own, on one core: two of them share the machine."""

    def __init__(self, *arguments: object, **more: str) -> None:
        command = [sys.executable, "-m", "tests.schedules", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def report(self) -> dict[str, Any]:
        """What it printed; its standard error where it printed nothing."""
        printed, said = self.process.communicate(timeout=850)
        assert printed, said[-4000:]
        report: dict[str, Any] = json.loads(printed.splitlines()[-1]) | {"said": said[-4000:]}
        assert (self.process.returncode, bool(report["misses"])) in ((0, False), (1, True))
        return report


@pytest.fixture(scope="module")
def tiny() -> list[dict[str, Any]]:
    """200 schedules on a random Llama of two layers: six engines, three in each process."""
    runs = [
        Run("--schedules", 100, "--seed", SEED, *("--engine", 0, "--engine", 1, "--engine", 2)),
        Run("--schedules", 100, "--seed", SEED + 100, *("--engine", 3, "--engine", 4, "--engine", 5)),
    ]
    return [run.report() for run in runs]


def test_200_random_schedules_equal_the_reference(tiny: list[dict[str, Any]]) -> None:
    assert sum(report["schedules"] for report in tiny) == 200, [report["said"] for report in tiny]
    assert [report["misses"] for report in tiny] == [0, 0]
    assert max(report["cpu_seconds"] for report in tiny) < 360


def test_they_came_to_the_places_where_mistakes_are_made(tiny: list[dict[str, Any]]) -> None:
    for what, least in {
        "preemptions": 20,
        "straddling_chunks": 10,
        "one_token_prompt_chunks": 50,
        "mixed_steps": 1000,
        "cached_tokens": 10_000,
        "prompt_logprobs": 10_000,
        "second_turns": 100,
        "aborted": 20,
        "reloads_midway": 15,
        "tokens": 20_000,
    }.items():
        assert sum(report[what] for report in tiny) >= least, what
    for method in rule.METHODS:
        assert sum(report["tokens_by_method"][method] for report in tiny) > 1000, method
    assert max(report["most_adapters_in_a_step"] for report in tiny) >= 3
    assert sum(report["samples"] for report in tiny) > 1.2 * sum(report["requests"] for report in tiny)
    slots = [engine["slots"] for report in tiny for engine in report["engines"]]
    assert {1, 2, 3, 4} == set(slots)
    assert {engine["prefix_caching"] for report in tiny for engine in report["engines"]} == {True, False}


def test_20_random_schedules_on_the_real_small_model() -> None:
    engines = [
        Run("--model", "smollm2-135m", "--schedules", 10, "--asks", 4, "--seed", 1000 + i, "--engine", i)
        for i in (0, 2)
    ]
    reports = [run.report() for run in engines]
    for report in reports:
        assert (report["schedules"], report["misses"]) == (10, 0), report["said"]
    assert sum(report["mixed_steps"] for report in reports) > 40


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each worker")
def test_two_workers_hold_their_shares_and_answer_as_one() -> None:
    """Tensor parallel in float32: each worker loads its own part of every adapter, and all of them arrive before a step."""
    report = Run(
        *("--schedules", 8, "--seed", 3, "--engine", 4, "--tensor-parallel", 2, "--method", "lorap+direftp"),
        VLLM_CPU_OMP_THREADS_BIND="0|1",
    ).report()
    assert (report["schedules"], report["misses"]) == (8, 0), report["said"]
    assert report["evictions"] > 5


def test_bfloat16_leans_to_no_other_mask() -> None:
    """What a CPU serves a bfloat16 model in by itself; there rounding is large, so see `check_spread`."""
    report = Run("--dtype", "bfloat16", "--schedules", 16, "--engine", 2, "--seed", SEED).report()
    assert (report["schedules"], report["misses"]) == (16, 0), report["said"]
    assert report["judged_alone"] > 20


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("off-by-one", 0, "lorap"), ("phase-by-step", 0)),
        (("off-by-one", 0, "direftp"), ("hidden-alone", 0, "lorap+direftp")),
        (("name-keyed", 3), ("no-phase", 3)),
        (("stock-cache", 0), ("base-takes-the-last-slot", 1)),
        (("stale-place", 4), ("early", 1)),
    ],
)
def test_planted_faults_are_found(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    """Mutation checks, on the same schedules; stock-cache and base-takes-the-last-slot are upstream's own faults."""
    faults = (first, second)
    runs = [
        Run(
            "--mutation",
            fault[0],
            "--engine",
            fault[1],
            *(("--method", *fault[2:]) if fault[2:] else ()),
            "--schedules",
            40,
            "--seed",
            SEED,
        )
        for fault in faults
    ]
    for fault, run in zip(faults, runs, strict=True):
        report = run.report()
        assert report["misses"], fault
        assert not report["worst"] <= 0.1, fault  # a hundred times the bound, or no number at all
