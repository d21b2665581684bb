"""`train` with shared prompts and packing: the same steps after a resume, the counts that were planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft_cli.errors import UserError
from preft_cli.training import session
from preft_cli.training.plan import plan_train
from preft_cli.training.run import train
from tests.unit import test_training_run as runs
from tests.unit.test_training_run import config, logged


def conversation(n: int, turns: int) -> dict[str, Any]:
    said = [("user" if m % 2 == 0 else "assistant", f"foo {n} bar" * (1 + m % 3)) for m in range(2 * turns)]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


CONVERSATIONS = [conversation(n // 2, 1 + n % 3) for n in range(9)]
NUM_ROWS = sum(1 + n % 3 for n in range(9))
PACKED = {"packing": True, "max_length": 250, "batch_size": 2}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, CONVERSATIONS)))
    return tmp_path


@pytest.mark.parametrize("options", [{"batch_size": 3}, PACKED], ids=["shared", "packed"])
def test_case_9_stopping_and_resuming_changes_nothing(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    options = options | {"max_steps": 10}
    whole = train(config(base, train=options | {"output_dir": "whole"}, eval={"file": None}), root)
    parts = config(base, train=options | {"output_dir": "parts"}, eval={"file": None})
    with monkeypatch.context() as patch:
        runs.stop_after(patch, 7, runs.interrupt)
        with pytest.raises(UserError, match=r"stopped at step [78] of 10"):
            train(parts, root)
    assert train(parts, root, resume=True).digest == whole.digest
    assert logged(root / "parts") == logged(root / "whole")
    assert whole.epochs > 1, "a resume within a later epoch"


def test_sharing_and_padding_side_change_nothing(base: Path, root: Path) -> None:
    """The whole data is one step, so that both runs see the same rows in it."""
    options = {"batch_size": NUM_ROWS, "max_steps": 3}
    plain = options | {"share_prompts": False, "output_dir": "plain"}
    other = options | {"padding_side": "left", "output_dir": "other"}
    apart, shared = (train(config(base, adapter={"dropout": 0.0}, train=one), root) for one in (plain, other))
    for ours, theirs in zip(logged(root / "other"), logged(root / "plain"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert shared.tokens == apart.tokens, "those of the rows, whatever was computed once"
    assert shared.held_out.adapter == pytest.approx(apart.held_out.adapter, rel=1e-5)


def test_the_planned_steps_are_taken(base: Path, root: Path) -> None:
    shared = config(base, train={"max_steps": None, "batch_size": 4}, eval={"file": None})
    assert plan_train(shared, root).steps == train(shared, root).steps == -(-NUM_ROWS // 4)
    packed = config(base, train=PACKED | {"max_steps": None, "output_dir": "packed"}, eval={"file": None})
    plan = plan_train(packed, root)
    assert (plan.rows, plan.rows_per_step, plan.steps) == (NUM_ROWS, None, None)
    assert plan_train(config(base, train=PACKED), root).steps == 20
    assert 0 < train(packed, root).steps < NUM_ROWS / 4


def test_packing_is_refused_before_a_model_is_loaded(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "load_base", lambda _: pytest.fail("loaded a model"))
    monkeypatch.setattr("preft_cli.training.apart.KNOWN", ("qwen3",))
    with pytest.raises(UserError, match=r"train\.packing: .*it is a llama, and .* on qwen3\. Set it to false"):
        train(config(base, train=PACKED), root)
