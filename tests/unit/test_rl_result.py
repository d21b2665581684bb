"""What an RL run leaves behind: accuracies with intervals, the summary of its steps, and who can read its result.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.rl.accuracy import Accuracy, HeldOutAccuracy
from preft_cli.rl.intervals import paired_difference, wilson
from preft_cli.rl.report import print_result
from preft_cli.rl.result import RlResult, parse_result
from preft_cli.rl.summary import RunSummary
from preft_cli.training.beside import earlier_runs
from preft_cli.training.metrics import Metrics
from preft_cli.training.output import RunFolder
from preft_cli.training.result import HeldOutLoss, TrainResult
from tests.unit.rl_runs import held_out, rl_result, stats, write_run


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    # Newcombe, Stat. Med. 17 (1998) 857, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_as_published(right: int, total: int, low: float, high: float) -> None:
    assert wilson(right, total) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    mirrored = wilson(total - right, total)
    assert mirrored == (pytest.approx(1 - high, abs=5e-5), pytest.approx(1 - low, abs=5e-5))
    assert (wilson(0, total)[0], wilson(total, total)[1]) == (0, 1)


@pytest.mark.parametrize(
    ("both", "first", "second", "neither", "low", "high"),
    [
        (14, 5, 0, 22, 0.011, 0.226),  # Altman et al., Statistics with Confidence (2000), table 6.2
        (1, 1, 7, 12, -0.507, -0.026),  # Fagerland et al., Statistical Analysis of Contingency Tables (2017), chapter 8
        (59, 6, 16, 80, -0.1186, -0.0046),  # the same
    ],
)
def test_intervals_of_paired_differences_as_published(
    both: int, first: int, second: int, neither: int, low: float, high: float
) -> None:
    digits = 5e-5 if round(low, 3) != low else 5e-4
    assert paired_difference(both, first, second, neither) == (
        pytest.approx(low, abs=digits), pytest.approx(high, abs=digits)
    )  # fmt: skip
    turned = paired_difference(both, second, first, neither)
    assert turned == (pytest.approx(-high, abs=digits), pytest.approx(-low, abs=digits))


def test_the_same_answers_still_leave_doubt() -> None:
    low, high = paired_difference(0, 0, 0, 30)
    assert low == -high < -0.05
    assert paired_difference(30, 0, 0, 0) == (pytest.approx(low), pytest.approx(high))


def test_pairs_count_problem_by_problem() -> None:
    base, adapter = [True, True, False, False, False], [True, False, True, True, False]
    measured = HeldOutAccuracy.of(base, adapter, digest="x", constant=("yes", 3))
    assert (measured.base, measured.adapter) == (Accuracy.of(2, 5), Accuracy.of(3, 5))
    difference = measured.difference
    assert (difference.only_adapter, difference.only_base, difference.value) == (2, 1, pytest.approx(0.2))
    assert (difference.low, difference.high) == paired_difference(1, 2, 1, 1)
    assert not measured.beats_constant
    assert "best constant answer 'yes': 60.0% (23.1-88.2)" in measured.line()
    assert measured.line().startswith(
        "held-out accuracy: base 40.0% (11.8-76.9), adapter 60.0% (23.1-88.2), +20.0 points"
    )
    with pytest.raises(ValueError, match="longer"):
        HeldOutAccuracy.of(base, adapter[1:], digest="x")


def test_the_summary_of_the_steps(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.accuracy(0, "base", 1, 4)
    for step in range(1, 31):
        sent = step % 2 == 1  # as with train.grpo.num_iterations: 2
        changes = {
            "reward_mean": step / 100,
            "tied_share": float(step == 30),
            "seconds_generation": 2.0 * sent,
            "generated_tokens": 500 * sent,
            "seconds_sync": step / 1000 if sent else 0.0,
            "sync_bytes": 7 * sent,
            "seconds_rewards": 0.0,
            "seconds_training": 1.0,
            "seconds_total": 4.0,
            "logprob_gap_mean": float("nan") if step == 3 else 0.01,
            "logprob_gap_max": 0.5 if step == 9 else 0.1,
        }
        metrics.train(**stats(step, **changes).row())
    summary = RunSummary.of(metrics.rows())
    assert (summary.reward_first, summary.reward_last) == (pytest.approx(0.055), pytest.approx(0.255))
    assert (summary.generated_tokens, summary.generated_tokens_per_s) == (7500, 250.0)
    assert summary.sync is not None
    assert (summary.sync.number, summary.sync.num_bytes) == (15, 7)
    assert (summary.sync.median_ms, summary.sync.largest_ms) == (pytest.approx(15), pytest.approx(29))
    assert (summary.logprob_gap_mean, summary.logprob_gap_max) == (pytest.approx(0.01), 0.5)
    assert (summary.steps_without_signal, summary.tied_share) == (1, pytest.approx(1 / 30))
    shares = summary.shares
    assert shares is not None
    assert shares.generation == shares.training == 0.25
    assert sum(shares.model_dump().values()) == pytest.approx(1)
    nothing = RunSummary.of([])
    assert (nothing.reward_first, nothing.shares, nothing.sync, nothing.generated_tokens_per_s) == (None, None, None, 0)


def sft_result(rl: RlResult) -> dict[str, Any]:
    """As a version of preft without RL wrote it."""
    loss = HeldOutLoss(base=4.0, adapter=3.0, rows=10, dropped=0, digest="rows").model_dump()
    old = rl.model_dump(mode="json", exclude={"task", "summary", "held_out"})
    return old | {"held_out": loss, "train_loss": 3.0, "tokens": 100, "tokens_per_s": 10.0}


def test_results_of_both_kinds_are_read_back(tmp_path: Path) -> None:
    write_run(Metrics(tmp_path / "metrics.jsonl"))
    rl = rl_result(tmp_path, held_out(110))
    folder = RunFolder(tmp_path)
    folder.result.write_text(rl.model_dump_json())
    assert folder.read_result() == rl
    old = sft_result(rl)
    folder.result.write_text(json.dumps(old))
    read = folder.read_result()
    assert isinstance(read, TrainResult)
    assert (read.task, read.held_out and read.held_out.adapter) == ("sft", 3.0)
    for broken in ("", "[1]", '{"task": "grpo"}', rl.model_dump_json()[:-9], json.dumps({**old, "task": "ppo"})):
        folder.result.write_text(broken)
        with pytest.raises(UserError, match="is damaged; remove it"):
            folder.read_result()
    with pytest.raises(ValueError, match="unheard_of"):
        parse_result(json.dumps(rl.model_dump(mode="json") | {"unheard_of": 1}).encode())


def test_runs_on_the_same_problems_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Metrics(tmp_path / "metrics.jsonl"))
    runs = {
        "worse": rl_result(tmp_path, held_out(60), method="lora").model_dump_json(),
        "better": rl_result(tmp_path, held_out(150), method="direftp").model_dump_json(),
        "others": rl_result(tmp_path, held_out(150, digest="other problems")).model_dump_json(),
        "unmeasured": rl_result(tmp_path, None).model_dump_json(),
        "sft": json.dumps(sft_result(rl_result(tmp_path, None))),
    }
    for name, text in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text)
    measured = held_out(25)
    beside = earlier_runs(tmp_path / "this", "owner/model", measured)
    assert [run.folder.name for run in beside] == ["better", "worse"]
    loss = HeldOutLoss(base=4.0, adapter=3.0, rows=10, dropped=0, digest="rows")
    assert [run.folder.name for run in earlier_runs(tmp_path / "this", "owner/model", loss)] == ["sft"]
    capsys.readouterr()
    print_result(rl_result(tmp_path, measured, beside=beside, adapter="[name]"))
    printed = capsys.readouterr().err
    assert printed.index("direftp") < printed.index("│ worse") < printed.index("this run"), "the highest accuracy first"
    for text in (
        "21.0% (15.9-27.2)", "12.5% (8.6-17.8)", "-8.5 points", "'3': 15.0% (10.7-20.6); the adapter does no better",
        "+54.0 pts", "generation ", "rest ", "ms (median of 60)", "9.80 MB", "[name]", "3.00 GiB",
    ):  # fmt: skip
        assert text in printed


def test_finished_runs_are_known_by_their_config(tmp_path: Path) -> None:
    config = PreftConfig.model_validate({"train": {"task": "grpo", "grpo": {"environment": "gcd"}}})
    folder = RunFolder(tmp_path / "run")
    folder.prepare(config, resume=False)
    write_run(Metrics(folder.metrics), steps=2)
    folder.result.write_text(rl_result(folder.path, held_out(60)).model_dump_json())
    assert folder.is_finished(config)
    other = PreftConfig.model_validate({"train": {"task": "grpo", "grpo": {"environment": "gcd", "beta": 0.1}}})
    assert not folder.is_finished(other)
