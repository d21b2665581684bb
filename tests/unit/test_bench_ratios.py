"""Ratios of repetitions: beside each other, across blocks by way of the base arm, and which of two settings was better."""

from __future__ import annotations

import pytest

from preft_cli.bench.assemble import better
from preft_cli.bench.ratios import ratios, same_seed
from preft_cli.bench.results import ArmResult, Counters, Repetition
from tests.unit.bench_results import make_result

COUNTERS = Counters(preemptions=0, prompt_tokens=1, prefix_cache_queries=0, prefix_cache_hits=0, adapter_loads=None)


def repetition(number: int, block: int, rate: float, failures: int = 0) -> Repetition:
    done = {"number": number, "block": block, "seconds": 12 / rate, "requests": 12, "failures": failures}
    return Repetition.model_validate({**done, "tokens_asked": 12, "tokens_produced": 12, "counters": COUNTERS})


def test_within_a_block_repetitions_are_compared_one_by_one() -> None:
    arms = {"base": [repetition(0, 0, 10), repetition(1, 0, 20)], "a": [repetition(0, 0, 5), repetition(1, 0, 5)]}
    assert ratios(arms)["a/base"].model_dump() == {"median": 0.375, "low": 0.25, "high": 0.5}


def test_a_drift_between_blocks_cancels_out() -> None:
    """In block 1 the machine is half as fast: b, at half of a's rate, is as good as a."""
    arms = {
        "base": [repetition(0, 0, 10), repetition(0, 1, 5)],
        "a": [repetition(0, 0, 4)],
        "b": [repetition(0, 1, 2)],
    }
    found = ratios(arms)
    assert (found["a/base"].median, found["b/base"].median) == (pytest.approx(0.4), pytest.approx(0.4))
    assert (found["a/b"].median, found["b/a"].median) == (pytest.approx(1), pytest.approx(1))


def test_engines_alone_are_compared_with_the_base_of_the_same_number() -> None:
    arms = {
        "base": [repetition(0, 0, 10), repetition(1, 2, 20)],
        "a": [repetition(0, 1, 5), repetition(1, 3, 5)],
    }
    assert ratios(arms)["a/base"].model_dump() == {"median": 0.375, "low": 0.25, "high": 0.5}


def test_an_arm_that_answered_nothing_has_no_ratio() -> None:
    arms = {"base": [repetition(0, 0, 10)], "a": [repetition(0, 0, 5, failures=12)]}
    assert ratios(arms) == {}


def test_the_second_time_is_compared_with_the_first_of_its_block() -> None:
    first = [repetition(0, 0, 10), repetition(1, 0, 99), repetition(0, 1, 5)]
    assert same_seed(first, [repetition(0, 0, 11), repetition(0, 1, 5.5)]) == pytest.approx(1.1)
    assert same_seed(first, []) is None


def test_the_better_settings_are_those_that_were_faster_beside_the_base_arm() -> None:
    base = [repetition(0, 0, 10), repetition(0, 1, 5)]
    fast_machine, slow_machine = setting("x", repetition(0, 0, 4)), setting("y", repetition(0, 1, 3))
    assert better([fast_machine, slow_machine], base).variant == "y"
    assert better([slow_machine, fast_machine], base).failures == 2


def setting(variant: str, done: Repetition) -> ArmResult:
    made = make_result({"base": [1], "lora": [1]}).arms["lora"]
    return made.model_copy(update={"variant": variant, "repetitions": [done], "failures": 1})
