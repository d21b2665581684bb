"""`train` on a tiny model: what it writes, when it refuses, and that stopping and resuming changes nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from preft_cli.adapters.folder import load_trained
from preft_cli.config.schema import PreftConfig
from preft_cli.console import err
from preft_cli.errors import UserError
from preft_cli.training import callbacks, run, session
from preft_cli.training.objective import LossSum, Objective
from preft_cli.training.order import Order
from preft_cli.training.output import RunFolder
from preft_cli.training.plan import plan_train
from preft_cli.training.report import print_result
from preft_cli.training.result import TrainResult
from preft_cli.training.run import train

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [
    {"messages": [{"role": "user", "content": f"foo {n}"}, {"role": "assistant", "content": "bar" * (1 + n % 3)}]}
    for n in range(12)
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def config(base: Path, **sections: dict[str, Any]) -> PreftConfig:
    train_section = {"max_steps": 20, "batch_size": 4, "learning_rate": 0.01, "dtype": "float32", "report_to": []}
    return PreftConfig.model_validate(
        {
            "model": {"base": str(base)},
            "adapter": {"name": "tiny", "rank": 4, "dropout": 0.1} | sections.get("adapter", {}),
            "train": train_section | sections.get("train", {}),
            "eval": {"file": "heldout.jsonl"} | sections.get("eval", {}),
        }
    )


def logged(folder: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == sorted(
        {row["step"] for row in rows if row["kind"] == "train"}
    )
    return [(r["step"], r["loss"], r["learning_rate"], r["grad_norm"]) for r in rows if r["kind"] == "train"]


def stop_after(
    monkeypatch: pytest.MonkeyPatch, step: int, how: Any, reporter: type[callbacks.Reporter] = callbacks.Reporter
) -> None:
    """Call `how()` when optimizer step `step` has been logged."""
    original = reporter.on_log

    def on_log(self: Any, args: Any, state: Any, control: Any, logs: Any, **rest: Any) -> None:
        original(self, args, state, control, logs, **rest)
        if state.global_step == step and "loss" in logs:
            how()

    monkeypatch.setattr(reporter, "on_log", on_log)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_run_leaves_what_it_promises(base: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(config(base, train={"report_to": ["tensorboard"]}), root)
    folder = root / "runs" / "tiny"
    assert {path.name for path in folder.iterdir()} == {
        "preft.resolved.yaml", "metrics.jsonl", "loss.png", "result.json", "adapter", "checkpoints", "tensorboard",
    }  # fmt: skip
    assert TrainResult.model_validate_json((folder / "result.json").read_text()) == result
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert all(path.exists() for path in result.artefacts.values())
    assert (result.steps, result.rows, result.dropped, result.dtype) == (20, 12, 0, "float32")
    assert result.held_out is not None
    assert result.held_out.adapter < result.held_out.base
    printed = capsys.readouterr().err
    assert result.held_out.line() in printed
    assert "training: done, 20/20 steps, loss" in printed
    print_result(result)
    assert f"  {folder / 'loss.png'}\n" in capsys.readouterr().err


def test_the_saved_adapter_knows_where_it_comes_from(base: Path, root: Path) -> None:
    result = train(config(base, adapter={"target_modules": ["q_proj", "down_proj"], "use_rslora": True}), root)
    adapter = load_trained(root / "runs" / "tiny" / "adapter")
    assert adapter.digest() == result.digest
    assert (adapter.method, adapter.rank, len(adapter.pairs)) == ("lorap", 4, 4)
    assert {pair.scaling for pair in adapter.pairs.values()} == {32 / 4**0.5}
    assert adapter.meta["base_model"] == str(base)
    assert len(adapter.meta["chat_template_digest"]) == 64
    assert (adapter.meta["steps"], adapter.meta["seed"]) == (20, 0)
    assert adapter.meta["held_out_loss"]["adapter"] == result.held_out.adapter
    assert adapter.dtype == "float32"
    stock = {"adapter_config.json", "adapter_model.safetensors"}
    assert not [path for path in (root / "runs").rglob("*") if path.name in stock], "stock loaders would apply these"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_case_9_stopping_and_resuming_changes_nothing(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    options = {"gradient_accumulation_steps": accumulation, "batch_size": 2}
    orders: list[list[int]] = []
    original = Order.__iter__
    monkeypatch.setattr(Order, "__iter__", lambda order: orders.append(list(original(order))) or iter(orders[-1]))
    whole = train(config(base, train=options | {"output_dir": "whole"}), root)
    epochs = orders.copy()
    assert len(set(map(tuple, epochs))) == len(epochs) == (4 if accumulation == 1 else 7), "another order in each epoch"
    parts = config(base, train=options | {"output_dir": "parts"})
    with monkeypatch.context() as patch:
        stop_after(patch, 10, interrupt)
        with pytest.raises(UserError, match=r"stopped at step 1[01] of 20; a checkpoint is saved"):
            train(parts, root)
    data = root / "train.jsonl"
    rows = data.read_text()
    data.write_text(rows.partition("\n")[2])
    with pytest.raises(UserError, match=r"checkpoint-1[01] was trained on other rows than those of train\.file now"):
        train(parts, root, resume=True)
    data.write_text(rows)
    orders.clear()
    resumed = train(parts, root, resume=True)
    assert orders == epochs[1 if accumulation == 1 else 3 :]
    assert logged(root / "parts") == logged(root / "whole")
    assert resumed.digest == whole.digest
    assert resumed.held_out == whole.held_out


def test_resuming_a_crashed_run_uses_the_last_complete_checkpoint(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(config(base, train={"output_dir": "whole"}), root)

    def crash() -> None:
        raise RuntimeError("power cut")

    parts = config(base, train={"output_dir": "parts", "save_every": 5})
    with monkeypatch.context() as patch:
        stop_after(patch, 13, crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train(parts, root)
    (root / "parts" / "checkpoints" / "checkpoint-12").mkdir()
    assert RunFolder(root / "parts").last_checkpoint() == root / "parts" / "checkpoints" / "checkpoint-10"
    assert train(parts, root, resume=True).digest == whole.digest
    assert logged(root / "parts") == logged(root / "whole")


def test_accumulation_equals_one_large_batch(base: Path, root: Path) -> None:
    """Rows differ in length: averaging the mean losses of small batches would weigh tokens differently."""
    plain = {"adapter": {"dropout": 0.0}}
    train(config(base, **plain, train={"output_dir": "large", "batch_size": 6, "max_steps": 4}), root)
    small = {"output_dir": "small", "batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 4}
    train(config(base, **plain, train=small), root)
    for large_step, small_step in zip(logged(root / "large"), logged(root / "small"), strict=True):
        assert large_step == pytest.approx(small_step, rel=1e-4)


def test_case_8_gradient_checkpointing_changes_nothing(base: Path, root: Path) -> None:
    train(config(base, train={"output_dir": "off", "max_steps": 5}), root)
    train(config(base, train={"output_dir": "on", "max_steps": 5, "gradient_checkpointing": True}), root)
    for off, on in zip(logged(root / "off"), logged(root / "on"), strict=True):
        assert off == pytest.approx(on, rel=1e-5)


def test_warm_up_then_cosine_to_zero(base: Path, root: Path) -> None:
    train(config(base, train={"warmup_ratio": 0.2}), root)
    rates = [row[2] for row in logged(root / "runs" / "tiny")]
    assert rates[:5] == pytest.approx([0, 0.0025, 0.005, 0.0075, 0.01])
    assert rates[12] == pytest.approx(0.005)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(("steps", "rates"), [(1, [0.01]), (2, [0, 0.01])])
def test_the_warm_up_leaves_a_step_that_trains(base: Path, root: Path, steps: int, rates: list[float]) -> None:
    train(config(base, train={"max_steps": steps, "warmup_ratio": 1.0}), root)
    assert [row[2] for row in logged(root / "runs" / "tiny")] == rates
    assert any(pair.b.any() for pair in load_trained(root / "runs" / "tiny" / "adapter").pairs.values())


def test_case_10_nan_stops_and_keeps_the_last_good_adapter(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Objective.__call__, []

    def poisoned(self: Objective, batch: Any, model: Any = None) -> LossSum:
        loss = original(self, batch, model)
        calls.append(1)
        return loss._replace(total=loss.total * float("nan")) if model is not None and len(calls) >= 7 else loss

    monkeypatch.setattr(Objective, "__call__", poisoned)
    with pytest.raises(
        UserError, match=r"the loss is not a finite number in step \d+\. The adapter of step \d+ is kept"
    ):
        train(config(base, train={"save_every": 2}), root)
    kept = load_trained(root / "runs" / "tiny" / "adapter")
    assert 0 < kept.meta["steps"] < 20
    assert "not a finite number" in kept.meta["stopped"]
    assert all(torch.isfinite(pair.a).all() and torch.isfinite(pair.b).all() for pair in kept.pairs.values())
    assert any(pair.b.abs().max() > 0 for pair in kept.pairs.values())


def test_a_gradient_that_is_no_number_stops_before_the_weights_are_spoilt(base: Path, root: Path) -> None:
    with pytest.raises(UserError, match="not a finite number") as caught:
        train(config(base, train={"learning_rate": 1e30, "warmup_ratio": 0.0}), root)
    assert "Lower train.learning_rate" in str(caught.value)
    kept = load_trained(root / "runs" / "tiny" / "adapter")
    assert all(torch.isfinite(pair.a).all() for pair in kept.pairs.values())


def test_no_row_left_fails_before_a_model_is_loaded(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "load_base", lambda *_: pytest.fail("loaded a model"))
    with pytest.raises(UserError, match=r"no row is left: all 12 are longer than train.max_length = 3"):
        train(config(base, train={"max_length": 3}), root)
    assert not (root / "runs").exists()


def test_settings_are_checked_before_a_model_is_loaded(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "load_base", lambda *_: pytest.fail("loaded a model"))
    with pytest.raises(UserError, match=r"'q_prj' matches no linear layer .*Did you mean q_proj\?"):
        train(config(base, adapter={"target_modules": ["q_prj"]}), root)
    with pytest.raises(UserError, match="float16 needs a GPU"):
        train(config(base, train={"dtype": "float16"}), root)
    with pytest.raises(UserError, match="it can be served, not trained"):
        train(config(Path("random:smollm2-135m")), root)


def test_existing_folders(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = config(base, train={"max_steps": 2})
    first = train(short, root)
    with pytest.raises(UserError, match=r"is not empty. Give --resume .* --overwrite"):
        train(short, root)
    assert train(short, root, resume=True) == first, "a finished run has nothing to resume"
    with monkeypatch.context() as second:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            second.setenv(name, "2" if name == "WORLD_SIZE" else "1")
        second.setattr(err, "quiet", False)  # such a process stays quiet to its end
        second.setattr(run, "_train", lambda *_, **__: pytest.fail("waits for the first of the processes"))
        folder = RunFolder(root / "runs" / "tiny")
        recorded = folder.config.read_text()
        folder.config.write_text(recorded.replace("num_processes: 1", "num_processes: 2"))
        assert train(short, root, resume=True) == first
        folder.config.write_text(recorded)
    assert train(short, root, overwrite=True).digest == first.digest
    with pytest.raises(UserError, match="give one of them"):
        train(short, root, resume=True, overwrite=True)
    with pytest.raises(UserError, match=r"other settings: adapter.rank: 4 -> 8"):
        train(config(base, train={"max_steps": 2}, adapter={"rank": 8}), root, resume=True)


def test_folders_that_are_no_run_are_left_alone(base: Path, root: Path) -> None:
    (root / "precious").mkdir()
    (root / "precious" / "thesis.txt").write_text("draft")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match=r"train\.output_dir"):
            train(config(base, train={"output_dir": "precious"}), root, **options)
    assert (root / "precious" / "thesis.txt").read_text() == "draft"


def test_a_run_that_died_before_its_first_step_is_not_in_the_way(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, folder = config(base, train={"max_steps": 2}), root / "runs" / "tiny"

    def killed(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(session, "load_base", killed)
        with pytest.raises(MemoryError):
            train(config(base, adapter={"rank": 8}), root)
    assert (folder / "preft.resolved.yaml").is_file()
    (folder / "metrics.jsonl").write_text('{"kind": "eval", "step": 0, "which": "base", "loss": 3.2}\n')
    assert not plan_train(short, root).output_dir_in_use
    assert train(short, root).steps == 2
    assert [row[0] for row in logged(folder)] == [1, 2]
    assert plan_train(short, root).output_dir_in_use


@pytest.mark.parametrize("kept", ["result.json", "adapter", "checkpoints", "metrics.jsonl"])
def test_whatever_a_run_saved_is_in_use(base: Path, root: Path, kept: str) -> None:
    """Logged steps alone may be those of a run that goes on at this moment."""
    short, folder = config(base, train={"max_steps": 1}), RunFolder(root / "runs" / "tiny")
    train(short, root)
    for path in (folder.result, folder.adapter, folder.checkpoints, folder.metrics):
        if path.name != kept:
            path.rename(root / path.name)
    with pytest.raises(UserError, match="is not empty"):
        train(short, root)


@pytest.mark.parametrize("damage", ["project: {seed: 0", "", "project:\n  seed: 0\ntrain:\n", "\x00", "- 1"])
def test_resume_with_a_damaged_record(base: Path, root: Path, damage: str) -> None:
    short = config(base, train={"max_steps": 1})
    train(short, root)
    record = root / "runs" / "tiny" / "preft.resolved.yaml"
    record.write_text(damage)
    with pytest.raises(UserError, match=r"preft\.resolved\.yaml is truncated or damaged.*--overwrite"):
        train(short, root, resume=True)
    assert train(short, root, overwrite=True).steps == 1


def test_the_base_models_own_name_is_refused_first(root: Path) -> None:
    same = PreftConfig.model_validate({"model": {"base": "nowhere"}, "adapter": {"name": "nowhere"}})
    with pytest.raises(UserError, match=r"adapter\.name: 'nowhere' is the base model's own name") as caught:
        train(same, root)
    assert caught.value.exit_code == 2
    assert not (root / "runs").exists()
    assert any("base model's own name" in problem for problem in plan_train(same, root).problems)


def test_more_steps_continue_a_finished_run(base: Path, root: Path) -> None:
    train(config(base, train={"max_steps": 2}), root)
    assert train(config(base, train={"max_steps": 4}), root, resume=True).steps == 4
    assert [row[0] for row in logged(root / "runs" / "tiny")] == [1, 2, 3, 4]


def test_plan_needs_no_torch_and_names_problems(base: Path, root: Path) -> None:
    plan = plan_train(config(base, train={"max_steps": None, "epochs": 2, "batch_size": 5}), root)
    assert (plan.rows, plan.held_out_rows, plan.steps, plan.problems) == (12, 12, 6, [])
    assert plan.output_dir == root / "runs" / "tiny"
    (root / "train.jsonl").write_text("{}")
    broken = plan_train(config(base), root)
    assert broken.rows is None
    assert "train.jsonl:1: found an empty object" in broken.problems[0]


@pytest.mark.parametrize(("section", "key"), [("eval", "file"), ("train", "validation_file")])
def test_rows_that_are_trained_on_are_not_held_out(base: Path, root: Path, section: str, key: str) -> None:
    same = config(base, **{section: {key: str(root / "train.jsonl")}})
    said = f"{section}.{key}: {root / 'train.jsonl'} is train.file too; evaluate on rows that are not trained on"
    assert plan_train(same, root).problems == [said]
    with pytest.raises(UserError) as error:
        train(same, root)
    assert (str(error.value), error.value.exit_code) == (said, 2)


def test_plan_imports_the_core_install_alone() -> None:
    import subprocess
    import sys

    code = "import sys, preft_cli.training.plan; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
