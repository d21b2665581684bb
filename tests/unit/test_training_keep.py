"""Which adapter a run keeps: the third split, early stopping, and that a resumed run decides as an undisturbed one."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from preft_cli import console
from preft_cli.adapters.folder import load_trained
from preft_cli.config.schema import PreftConfig
from preft_cli.data import load
from preft_cli.errors import UserError
from preft_cli.training import boards, callbacks, plan, plot, prepare, session
from preft_cli.training.best import Best
from preft_cli.training.objective import LossSum, Objective
from preft_cli.training.plan import plan_train
from preft_cli.training.report import print_result
from preft_cli.training.result import TrainResult
from preft_cli.training.run import train
from tests.unit.test_training_run import ROWS, config, interrupt, logged, stop_after

pytestmark = pytest.mark.usefixtures("one_thread")

# Other answers than those of the training rows: their loss falls at first, and has its lowest value of the first five at step 6.
OTHERS = [
    {"messages": [{"role": "user", "content": f"foo {n}"}, {"role": "assistant", "content": "baz"}]} for n in range(4)
]
EARLY = {"validation_file": "validation.jsonl", "eval_every": 2, "early_stopping": 2}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, rows in {"train": ROWS, "heldout": ROWS, "validation": OTHERS}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def evaluated(folder: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["split"], row["step"], row["loss"]) for row in rows if row.get("which") == "adapter"]


def test_early_stopping_keeps_the_best_and_a_resumed_run_decides_alike(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(config(base, train=EARLY | {"output_dir": "whole", "report_to": ["tensorboard"]}), root)
    assert (whole.steps, whole.stopped_early) == (10, True)
    assert (whole.best_step, whole.kept_step, whole.chosen_on) == (6, 6, "validation")
    assert "also decided" not in capsys.readouterr().err, "the held-out rows decided nothing"
    measured = {step: loss for split, step, loss in evaluated(root / "whole") if split == "validation"}
    assert sorted(measured) == [2, 4, 6, 8, 10]
    assert whole.validation.adapter == min(measured.values()) == measured[6]
    assert (whole.last.step, whole.last.validation) == (10, measured[10])
    print_result(whole)
    shown = capsys.readouterr().err
    for text in (
        "10 (3.33 epochs), stopped early",
        "step 6, by validation loss",
        "last adapter, step 10",
        " GiB at most",
    ):
        assert text in shown
    assert 50e6 < whole.peak_memory < 64e9
    boards_hold(root / "whole" / "tensorboard", measured)

    # Stopped at the best step, where an evaluation is due, and again with half of the patience gone.
    parts = config(base, train=EARLY | {"output_dir": "parts"})
    at_best = root / "parts" / "checkpoints" / "checkpoint-6" / "adapter"
    for step in (6, 8):
        with monkeypatch.context() as patch:
            stop_after(patch, step - 1, interrupt)  # which ends the step after
            with pytest.raises(UserError, match=rf"stopped at step {step} of 20; a checkpoint is saved"):
                train(parts, root, resume=step == 8)
        if step == 6:
            digest_of_step_6 = load_trained(at_best).digest()
    resumed = train(parts, root, resume=True)
    assert (resumed.steps, resumed.stopped_early, resumed.best_step) == (10, True, 6)
    assert (resumed.validation, resumed.held_out, resumed.last) == (whole.validation, whole.held_out, whole.last)
    assert logged(root / "parts") == logged(root / "whole")
    assert evaluated(root / "parts") == evaluated(root / "whole")
    assert resumed.digest == whole.digest == digest_of_step_6
    kept = load_trained(root / "parts" / "adapter")
    assert (kept.digest(), kept.meta["steps"]) == (whole.digest, 6)
    assert train(parts, root, resume=True) == resumed, "a run that stopped early is finished"


def boards_hold(folder: Path, measured: dict[int, float]) -> None:
    """TensorBoard's own reader finds the losses."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    assert {event.step: event.value for event in events.Scalars("eval/validation_loss")} == pytest.approx(
        {0: events.Scalars("eval/validation_loss")[0].value} | measured
    )
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 11))
    assert events.Scalars("eval/held-out_loss")[-1].value < 6


def test_keep_last(base: Path, root: Path) -> None:
    """Without a third split the held-out rows may decide when to stop, and the result says so."""
    options = {"keep": "last", "eval_every": 2, "max_steps": 4, "early_stopping": 9}
    result = train(config(base, train=options | {"learning_rate": 1e-9, "output_dir": "still"}), root)
    assert (result.kept_step, result.last, result.chosen_on) == (4, None, "held-out")
    assert load_trained(root / "still" / "adapter").meta["steps"] == 4
    assert {path.name for path in root.glob("still/*")}.isdisjoint({"tensorboard"})


def test_held_out_rows_that_also_choose(base: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(config(base, train={"save_every": 2, "max_steps": 4}), root)
    assert (result.chosen_on, result.best_step, result.validation) == ("held-out", 4, None)
    assert "the held-out rows also decided which adapter is kept" in capsys.readouterr().err
    print_result(result)
    assert "(also used for choosing)" in capsys.readouterr().err
    assert [step for _, step, _ in evaluated(root / "runs" / "tiny")] == [2, 4], "the last one is not measured twice"


def test_nan_keeps_the_best_one(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, steps = Objective.__call__, []

    def poisoned(self: Objective, batch: Any, model: Any = None) -> LossSum:
        loss = original(self, batch, model)
        steps.extend([1] * (model is not None))
        return loss._replace(total=loss.total * float("nan")) if model is not None and len(steps) >= 9 else loss

    monkeypatch.setattr(Objective, "__call__", poisoned)
    with pytest.raises(
        UserError, match=r"finite number in step 9\. The adapter of step 6 is kept .*the best one so far"
    ):
        train(config(base, train=EARLY), root)
    assert load_trained(root / "runs" / "tiny" / "adapter").meta["steps"] == 6


def test_a_loss_that_is_no_number_is_no_gain() -> None:
    best = Best()
    for step, loss in enumerate([float("nan"), 2.0, float("nan"), 2.0], start=1):
        best.offer(step, loss, dict)
    assert (best.step, best.loss, best.misses) == (2, 2.0, 2)


def test_a_damaged_best(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"best\.safetensors is missing or damaged"):
        Best().load(tmp_path)
    Best().save(tmp_path)
    Best().load(tmp_path)
    (tmp_path / "best.safetensors").write_bytes(b"\x10")
    with pytest.raises(UserError, match="--overwrite"):
        Best().load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"early_stopping": 2, "validation_file": "v.jsonl"},
            "early_stopping: nothing is evaluated .* train.eval_every",
        ),
        ({"keep": "best"}, "train.keep: best: there are no rows to evaluate on; set train.validation_file"),
        ({"eval_every": 5}, "train.eval_every: there are no rows"),
        ({"parallel": "fsdp"}, "train.parallel: fsdp shares .* set train.num_processes to 2"),
        ({"parallel": "fsdp", "num_processes": 2, "quantize_base": "4bit"}, "use train.parallel: ddp"),
    ],
)
def test_settings_that_ask_for_what_is_not_there(
    tmp_path: Path, settings: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "prepare", lambda *_: pytest.fail("went on"))
    wrong = PreftConfig.model_validate({"train": settings})
    with pytest.raises(UserError, match=problem) as caught:
        train(wrong, tmp_path)
    assert caught.value.exit_code == 2
    assert set(str(caught.value).splitlines()) <= set(plan_train(wrong, tmp_path).problems)


def test_boards_that_are_not_installed(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(boards, "find_spec", lambda name: None)
    monkeypatch.setattr(plan, "find_spec", lambda name: None)
    monkeypatch.setattr(session, "load_base", lambda *_: pytest.fail("loaded a model"))
    with pytest.raises(UserError, match=r"train\.report_to: wandb is not installed: pip install 'wandb'"):
        train(config(base, train={"report_to": ["wandb"]}), root)
    assert "wandb is not installed" in plan.setting_problems(config(base, train={"report_to": ["wandb"]}))[0]
    assert boards.present_boards(PreftConfig()) == [], "the default is left out"
    assert "tensorboard is not installed" in capsys.readouterr().err


def test_case_11_lines_keep_coming_while_tokenising_loading_and_training(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """cases.md 11: each phase that can take long has lines of its own, also while it is stuck in one call."""

    monkeypatch.setattr(console, "PLAIN_INTERVAL_S", 0.02)

    def slowed(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            time.sleep(0.1)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    for owner, name in ((load, "tokenise"), (session, "load_base"), (Objective, "__call__")):
        slowed(owner, name)
    train(config(base, train={"max_steps": 3}), root)
    lines = capsys.readouterr().err
    for line in (
        r"tokenising train.file: 0/12 rows, \ds so far",
        rf"loading {base}: \ds so far",
        r"evaluating the base model \(held-out\): .*\ds so far",
        r"training: [12]/3 steps, loss \d\.\d+, \d+ tok/s, \ds so far, about \ds left",
    ):
        assert re.search(line, lines), line


def test_the_picture_knows_which_numbers_belong_together() -> None:
    def row(step: int, which: str, loss: float, split: str) -> dict[str, Any]:
        return {"kind": "eval", "step": step, "which": which, "loss": loss, "split": split}

    rows = [
        row(4, "adapter", 2.0, "validation"),
        row(0, "base", 5.0, "validation"),
        row(2, "adapter", 3.0, "validation"),
    ]
    rows += [
        row(0, "base", 6.0, "held-out"),
        row(2, "adapter", 4.0, "held-out"),
        {"kind": "train", "step": 1, "loss": 9},
    ]
    assert plot.split_curves(rows) == {"validation": (5.0, {2: 3.0, 4: 2.0}), "held-out": (6.0, {2: 4.0})}


def test_results_of_earlier_versions_can_still_be_read(base: Path, root: Path) -> None:
    result = train(config(base, train={"max_steps": 1}), root)
    new = {"validation", "chosen_on", "kept_step", "best_step", "stopped_early", "last", "num_processes", "peak_memory"}
    old = result.model_dump(mode="json", exclude=new)
    assert TrainResult.model_validate(old).held_out == result.held_out


def test_evaluations_are_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
    bar, stop = SimpleNamespace(update=lambda *_, **__: None), SimpleNamespace(requested=False)
    reporter = callbacks.Reporter(SimpleNamespace(tokens_seen=0), Any, bar, None, stop)  # type: ignore[arg-type]
    state: Any = SimpleNamespace(global_step=1, max_steps=3)
    for begin, end in ((1, 3), (10, 11)):
        now[0] = begin
        reporter.on_step_begin(Any, state, Any)  # type: ignore[arg-type]
        now[0] = end
        reporter.on_step_end(Any, state, Any)  # type: ignore[arg-type]
    assert (reporter.step_seconds, reporter.seconds) == (3, 11)
