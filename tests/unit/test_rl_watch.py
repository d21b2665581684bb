"""What is recorded of each step, and when people are told that nothing is learnt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preft_cli.rl import watch
from preft_cli.rl.stats import Sample
from preft_cli.rl.watch import Watcher
from preft_cli.training.metrics import Metrics
from tests.unit.rl_runs import stats

SAMPLE = Sample("Solve.\nHow many e's?", "I think \x1b[31m2", 0.0, "3")
NOTHING = {"tied_share": 1.0, "solved_share": 0.0, "reward_low": 0.0, "reward_high": 0.0, "reward_mean": 0.0}

Said = Callable[[], str]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """What the watcher told since the last call."""
    told: list[str] = []
    for name in ("say", "warn"):
        monkeypatch.setattr(watch, name, lambda text, name=name: told.append(f"{name}: {text}"))

    def since() -> str:
        text = "\n".join(told)
        told.clear()
        return text

    return since


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    return Metrics(tmp_path / "metrics.jsonl")


def steps(watcher: Watcher, numbers: range, **changes: Any) -> None:
    for step in numbers:
        watcher.step(stats(step, **changes), SAMPLE)


def test_each_step_is_a_row(metrics: Metrics, said: Said) -> None:
    note = Watcher(metrics, 64).step(stats(7, kl=None, entropy=float("nan"), grad_norm=float("inf")), SAMPLE)
    assert note == "reward 0.300, solved 30%, 2000 tok/s"
    assert said() == "", "a sound step needs no words"
    [row] = metrics.rows()
    assert (row["kind"], row["step"], row["rewards"], row["tokens_per_s"]) == ("train", 7, {"environment": 0.3}, 2000)
    assert "kl" not in row
    assert (row["entropy"], row["grad_norm"]) == (None, None)
    text = metrics.path.read_text()
    assert json.loads(text, parse_constant=pytest.fail), "JSON knows no NaN"
    assert stats(seconds_generation=0.0).tokens_per_s == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (NOTHING, "no answer is right. Either the problems are too hard"),
        ({"solved_share": 1.0, "reward_low": 1.0}, "every answer is right. These problems are too easy"),
        ({"cut_share": 1.0, "solved_share": 0.0}, "every answer was cut at 64 tokens before its end. Raise train.grpo"),
        ({"solved_share": 0.5}, "each problem is either always or never solved"),
    ],
)  # fmt: skip
def test_when_all_groups_tie(metrics: Metrics, said: Said, changes: dict[str, Any], why: str) -> None:
    watcher = Watcher(metrics, 64)
    watcher.step(stats(1, **(changes | {"tied_share": 0.99})), SAMPLE)
    assert said() == "", "one group tells answers apart"
    watcher.step(stats(2, **(changes | {"tied_share": 1.0})), SAMPLE)
    told = said()
    assert told.startswith("warn: step 2: the answers to each prompt all earned the same, so nothing can be learnt")
    assert why in told
    assert told.endswith(
        '  the prompt ends:  "Solve.\\nHow many e\'s?"\n'
        '  an answer:        "I think \\u001b[31m2"\n'
        "  its reward:       0\n"
        '  the right answer: "3"'
    )


def test_the_same_warning_comes_every_20_steps(metrics: Metrics, said: Said) -> None:
    watcher, tied_at = Watcher(metrics, 64), []
    for step in range(1, 50):
        watcher.step(stats(step, tied_share=1.0))
        if said():
            tied_at.append(step)
    assert tied_at == [1, 21, 41]


def test_a_reward_that_never_fires(metrics: Metrics, said: Said) -> None:
    watcher = Watcher(metrics, 64)
    steps(watcher, range(1, 10), **NOTHING)
    assert "the reward never tells answers apart" not in said()
    steps(watcher, range(10, 11), **NOTHING)
    told = said()
    assert "in 10 steps no answer earned more than 0: the reward never tells answers apart" in told
    assert "its reward:       0" in told
    steps(watcher, range(11, 30), **NOTHING)
    assert said() == "", "nor the weaker one right behind it"
    steps(watcher, range(30, 31), **NOTHING)
    assert "in 30 steps" in said()


@pytest.mark.parametrize(
    "other",
    [
        {},  # one step with different rewards
        NOTHING | {"reward_low": 0.2, "reward_high": 0.2},  # all earned the same, but more than before
        NOTHING | {"solved_share": 1.0, "reward_low": 1.0, "reward_high": 1.0},
    ],
)
def test_a_reward_that_fires_once(metrics: Metrics, said: Said, other: dict[str, Any]) -> None:
    watcher = Watcher(metrics, 64)
    steps(watcher, range(1, 10), **NOTHING)
    steps(watcher, range(10, 11), **other)
    steps(watcher, range(11, 20), **NOTHING)
    assert "never tells" not in said()
    steps(watcher, range(20, 21), **NOTHING)
    assert "in 10 steps" in said()


def test_always_right_is_not_never_rewarded(metrics: Metrics, said: Said) -> None:
    steps(Watcher(metrics, 64), range(1, 15), tied_share=1.0, solved_share=1.0, reward_low=1.0, reward_high=1.0)
    assert "never tells" not in said()


def test_trainer_and_engine_that_disagree(metrics: Metrics, said: Said) -> None:
    watcher = Watcher(metrics, 64)
    steps(watcher, range(1, 3), logprob_gap_mean=0.1, logprob_gap_max=9.0)
    steps(watcher, range(3, 4), logprob_gap_mean=None)
    assert said() == "", "single tokens may differ by much"
    steps(watcher, range(4, 23), logprob_gap_mean=0.101, logprob_gap_max=9.0)
    told = said()
    assert told.count("trainer and engine disagree") == 1
    assert "differ by 0.101 nats on average, 9.000 at most" in told
    steps(watcher, range(24, 25), logprob_gap_mean=0.2)
    assert "trainer and engine disagree" in said()


def test_entropy_that_collapses(metrics: Metrics, said: Said) -> None:
    watcher = Watcher(metrics, 64)
    steps(watcher, range(1, 6), entropy=0.8)
    steps(watcher, range(6, 9), entropy=0.041)
    assert said() == ""
    steps(watcher, range(9, 40), entropy=0.039)
    assert said() == (
        "say: note: step 9: the entropy has fallen to 0.0390 nats per token, from 0.800 in the first steps: the answers to a "
        "prompt are nearly all the same. A lower train.learning_rate, or a train.grpo.beta above 0, keeps them apart"
    )
    steps(watcher, range(40, 50), entropy=None)
    assert said() == ""


def test_a_resumed_run_knows_the_steps_before(metrics: Metrics, said: Said) -> None:
    first = Watcher(metrics, 64)
    steps(first, range(1, 9), **NOTHING, entropy=1.0)
    said()
    metrics.rewind(7)
    again = Watcher(metrics, 64)
    steps(again, range(8, 10), **NOTHING, entropy=0.5)
    assert "in 10 steps" not in said(), "the step that was forgotten does not count"
    steps(again, range(10, 11), **NOTHING, entropy=0.04)
    told = said()
    assert "in 10 steps no answer earned more than 0" in told
    assert "from 1.000 in the first steps" in told


def test_long_texts_are_shortened() -> None:
    text = Sample("p" * 500 + "the question?", "start" + "x" * 500 + "end", None, None).text()
    assert 'the prompt ends:  "... ppp' in text
    assert 'the question?"' in text
    assert '"startxxx' in text
    assert 'xxxend"' in text
    assert "its reward:       none" in text
    assert "right answer" not in text
    assert max(map(len, text.splitlines())) < 280
