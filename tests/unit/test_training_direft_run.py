"""Whole runs of `train` with DiReFT, alone and beside LoRA, and how runs stand side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.residual import unknown
from preft_cli.adapters.base import BaseFacts
from preft_cli.adapters.folder import load_trained, load_trained_for
from preft_cli.errors import UserError
from preft_cli.models import BaseModel
from preft_cli.training import session
from preft_cli.training.beside import earlier_runs
from preft_cli.training.objective import LossSum, Objective
from preft_cli.training.report import print_result
from preft_cli.training.result import TrainResult
from preft_cli.training.run import train
from tests.unit.test_training_run import ROWS, config, interrupt, logged, stop_after
from tests.unit.tiny import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

ORTHOGONAL = {"method": "direftp", "orthogonal": True, "layers": [1]}
BOTH = {"method": "lorap+direftp", "direft_rank": 2}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


@pytest.mark.parametrize("adapter", [ORTHOGONAL, BOTH])
def test_case_9_stopping_and_resuming_changes_nothing(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch, adapter: dict[str, Any]
) -> None:
    options = {"batch_size": 2, "weight_decay": 0.1}
    whole = train(config(base, adapter=adapter, train=options | {"output_dir": "whole"}), root)
    parts = config(base, adapter=adapter, train=options | {"output_dir": "parts"})
    with monkeypatch.context() as patch:
        stop_after(patch, 10, interrupt)
        with pytest.raises(UserError, match="a checkpoint is saved"):
            train(parts, root)
    resumed = train(parts, root, resume=True)
    assert logged(root / "parts") == logged(root / "whole")
    assert (resumed.digest, resumed.held_out) == (whole.digest, whole.held_out)
    assert whole.held_out.adapter < whole.held_out.base
    facts = BaseFacts.of(BaseModel(str(base), base))
    adapter_saved = load_trained_for(root / "whole" / "adapter", facts).adapter
    if adapter is ORTHOGONAL:
        (pair,) = adapter_saved.pairs.values()
        torch.testing.assert_close(pair.b.T @ pair.b, torch.eye(4), atol=1e-5, rtol=0)


def test_case_8_gradient_checkpointing_changes_nothing(base: Path, root: Path) -> None:
    for name in ("off", "on"):
        options = {"output_dir": name, "max_steps": 3, "gradient_checkpointing": name == "on"}
        train(config(base, adapter={"method": "direftp"}, train=options), root)
    for off, on in zip(logged(root / "off"), logged(root / "on"), strict=True):
        assert off == pytest.approx(on, rel=1e-5)


def test_case_10_nan_stops_and_keeps_the_last_good_adapter(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Objective.__call__, []

    def poisoned(self: Objective, batch: Any, model: Any = None) -> LossSum:
        loss = original(self, batch, model)
        calls.append(1)
        return loss._replace(total=loss.total * float("nan")) if model is not None and len(calls) >= 7 else loss

    monkeypatch.setattr(Objective, "__call__", poisoned)
    with pytest.raises(UserError, match=r"the loss is not a finite number.*The adapter of step \d+ is kept"):
        train(config(base, adapter=BOTH), root)
    kept = load_trained(root / "runs" / "tiny" / "adapter")
    assert kept.meta["steps"] > 0
    for part in ("residual", "q_proj"):
        pairs = [pair for name, pair in kept.pairs.items() if name.endswith(part)]
        assert all(torch.isfinite(t).all() and t.abs().max() > 0 for p in pairs for t in p.tensors.values())


def save_neox(folder: Path) -> Path:
    """A base model whose decoder layers nobody has looked at."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, bos_token_id=3, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_an_unknown_architecture_is_refused_by_name_unless_declared(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_neox(tmp_path_factory.mktemp("neox"))
    wanted = config(folder, adapter={"method": "lorap+direftp"}, train={"max_steps": 6, "batch_size": 6})
    with monkeypatch.context() as patch:
        patch.setattr(session, "load_base", lambda _: pytest.fail("loaded a model"))
        with pytest.raises(UserError) as caught:
            train(wanted, root)
    assert unknown("gpt_neox") in str(caught.value)
    assert caught.value.exit_code == 2
    declared = wanted.model.model_copy(update={"residual_stream": True})
    result = train(wanted.model_copy(update={"model": declared}), root)
    assert result.held_out.adapter < result.held_out.base
    facts = BaseFacts.of(BaseModel(str(folder), folder), True)
    assert "gpt_neox.layers.1.residual" in load_trained_for(root / "runs" / "tiny" / "adapter", facts).adapter.pairs


def test_settings_are_checked_before_a_model_is_loaded(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "load_base", lambda *_: pytest.fail("loaded a model"))
    with pytest.raises(UserError, match=r"adapter\.layers: .* has no layer 2; it has 2 decoder layers, 0 to 1"):
        train(config(base, adapter={"method": "direftp", "layers": [0, 2]}), root)
    with pytest.raises(UserError, match="it can be served, not trained"):
        train(config(Path("random:smollm2-135m"), adapter={"layers": [0]}), root)
    with pytest.raises(pytest.fail.Exception):
        train(config(base, adapter={"layers": [0], "orthogonal": True}), root)
    assert "adapter.layers, adapter.orthogonal: nothing that method lorap has" in capsys.readouterr().err


def test_runs_stand_side_by_side(base: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, **adapter: Any) -> TrainResult:
        train_section = {"max_steps": 2, "output_dir": f"runs/{name}"}
        return train(config(base, adapter={"name": name, **adapter}, train=train_section), root)

    first = run("one")
    assert (first.beside, first.ranks) == ([], {"lora": 4})
    second = run("two", method="direftp", rank=3)
    assert [(r.adapter, r.method, r.folder.name) for r in second.beside] == [("one", "lorap", "one")]
    assert second.parameters == {"direft": 2 * (2 * 3 * 64 + 3)}
    third = run("three", **BOTH)
    assert [r.adapter for r in third.beside] == ["one", "two"]
    assert third.ranks == {"lora": 4, "direft": 2}
    assert third.parameters == {"lora": first.trainable_parameters, "direft": 2 * (2 * 2 * 64 + 2)}
    assert third.trainable_parameters == sum(third.parameters.values())
    assert TrainResult.model_validate_json((root / "runs" / "three" / "result.json").read_text()) == third
    capsys.readouterr()
    print_result(third)
    printed = capsys.readouterr().err
    assert "beside earlier runs on the same held-out rows" in printed
    for cell in ("base model", "this run", "4+2", "lorap+direftp", "direftp"):
        assert cell in printed
    assert "change ┃" in printed, "80 columns are enough"
    foreign_entries_are_passed_over(root / "runs", third)


def foreign_entries_are_passed_over(runs: Path, third: TrainResult) -> None:
    def beside(**changes: Any) -> list[str]:
        held_out = third.held_out.model_copy(update=changes)
        return [run.folder.name for run in earlier_runs(runs / "three", third.base_model, held_out)]

    text = (runs / "one" / "result.json").read_text()
    others = {"half": text[:100], "list": "[1]", "bench": '{"schema_version": 1, "kind": "bench"}', "binary": "\x00"}
    for name, content in {**others, "large": text + " " * (1 << 20), "copy": text}.items():
        (runs / name).mkdir()
        (runs / name / "result.json").write_text(content)
    (runs / "folder" / "result.json").mkdir(parents=True)
    (runs / "dangling").mkdir()
    (runs / "dangling" / "result.json").symlink_to(runs / "nowhere")
    (runs / "a file").write_text("")
    assert beside() == ["copy", "one", "two"]
    assert beside(digest="of other rows") == []
    assert beside(digest=None) == []
    assert earlier_runs(runs / "three", "another base", third.held_out) == []
    assert earlier_runs(runs / "three", third.base_model, None) == []
    older = {key: value for key, value in json.loads(text).items() if key not in ("ranks", "parameters", "beside")}
    assert TrainResult.model_validate(older).ranks == {}
