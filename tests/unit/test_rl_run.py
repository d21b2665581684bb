"""`preft train` with `train.task: grpo` on a tiny model: files, resume, and what stops a run before or at its first step."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from preft_cli.adapters.folder import load_trained
from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.rl import finish, session, upstream
from preft_cli.rl.plan import grpo_problems
from preft_cli.rl.prepare import prepare_rl
from preft_cli.rl.reporter import RlReporter
from preft_cli.rl.result import RlResult
from preft_cli.rl.session import RlSession, start_rollouts
from preft_cli.training.plan import plan_train
from preft_cli.training.run import train
from tests.unit.rl_rollouts import ReferenceRollouts
from tests.unit.test_training_run import interrupt, stop_after

pytestmark = pytest.mark.usefixtures("one_thread")

REWARDS = """
def letters(completions, **_):
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in completions]

def nothing(completions, **_):
    return [None] * len(completions)
"""


@pytest.fixture
def root(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose answers come from the reference."""
    for name, word in (("train", "foo"), ("heldout", "baz")):
        rows = [{"prompt": f"{word} {n}", "answer": "bar"} for n in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tiny_rewards.py").write_text(REWARDS)

    def start(config: PreftConfig, prepared: Any) -> ReferenceRollouts:
        return ReferenceRollouts(base, config.adapter.method, prepared.base.fingerprint)

    monkeypatch.setattr(session, "start_rollouts", start)
    return tmp_path


def config(base: Path, **sections: Any) -> PreftConfig:
    grpo = {"rewards": ["tiny_rewards:letters"], "num_generations": 4, "max_completion_length": 4}
    train = {
        "task": "grpo",
        "max_steps": 4,
        "batch_size": 8,
        "learning_rate": 0.02,
        "dtype": "float32",
        "report_to": [],
    }
    return PreftConfig.model_validate(
        {
            "model": {"base": str(base)},
            "serve": sections.get("serve", {}),
            "adapter": {"name": "tiny", "rank": 4} | sections.get("adapter", {}),
            "train": train | sections.get("train", {}) | {"grpo": grpo | sections.get("grpo", {})},
            "eval": {"file": "heldout.jsonl"} | sections.get("eval", {}),
        }
    )


def logged(folder: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "reward_mean", "loss", "learning_rate", "grad_norm", "length_mean", "logprob_gap_mean")
    return [tuple(row.get(key) for key in keys) for row in rows if row["kind"] == "train"]


def base_hash(run: RlSession) -> str:
    """Of all weights that are not the adapter's."""
    digest = hashlib.sha256()
    for name, parameter in sorted(run.adapted.model.named_parameters()):
        if not parameter.requires_grad:
            digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def test_a_run_leaves_what_it_promises_and_the_base_as_it_was(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = []
    for owner, name in ((RlSession, "measure_base"), (finish, "_measured")):
        original = getattr(owner, name)

        def noted(run: RlSession, original: Any = original) -> Any:
            hashes.append(base_hash(run))
            return original(run)

        monkeypatch.setattr(owner, name, noted)
    result = train(config(base, train={"save_every": 2, "eval_every": 2}), root)
    folder = root / "runs" / "tiny"
    assert isinstance(result, RlResult)
    assert {path.name for path in folder.iterdir()} == {
        "preft.resolved.yaml", "metrics.jsonl", "curves.png", "result.json", "adapter", "checkpoints",
    }  # fmt: skip
    assert RlResult.model_validate_json((folder / "result.json").read_text()) == result
    assert all(path.exists() for path in result.artefacts.values())
    assert (result.task, result.steps, result.rows, result.dtype) == ("grpo", 4, 8, "float32")
    assert result.held_out is not None
    assert result.held_out.rows == 8
    assert len(hashes) == 2
    assert hashes[0] == hashes[1]
    adapter = load_trained(folder / "adapter")
    assert adapter.digest() == result.digest
    assert any(pair.b.abs().max() > 0 for pair in adapter.pairs.values()), "it was trained"
    summary = result.summary
    assert summary.sync is not None
    assert summary.sync.number == 4
    assert summary.logprob_gap_max is not None
    assert summary.logprob_gap_max < 1e-4
    assert summary.shares is not None
    evaluated = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"eval"' in line]
    assert [(row["step"], row["which"]) for row in evaluated] == [(0, "base"), (2, "adapter"), (4, "adapter")]


def test_stopping_and_resuming_changes_nothing(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 9: the same problems, answers, learning rates and weights."""
    whole = train(config(base), root)
    expected = logged(root / "runs" / "tiny")
    again = config(base, adapter={"name": "again"})
    with monkeypatch.context() as patch:
        stop_after(patch, 2, interrupt, RlReporter)
        with pytest.raises(UserError, match="stopped at step 3 of 4"):
            train(again, root)
    resumed = train(again, root, resume=True)
    assert logged(root / "runs" / "again") == expected
    assert resumed.digest == whole.digest
    rows = root / "train.jsonl"
    rows.write_text(rows.read_text().replace("foo 3", "foo 33"))
    longer = config(base, adapter={"name": "again"}, train={"max_steps": 6})
    with pytest.raises(UserError, match="other problems than there are now"):
        train(longer, root, resume=True)


@pytest.mark.parametrize(("problems", "iterations"), [(3, 1), (8, 2)])
def test_resuming_in_another_epoch_and_with_several_iterations(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch, problems: int, iterations: int
) -> None:
    """The order of an epoch does not depend on those before it; answers are used up before a run stops."""
    rows = (root / "train.jsonl").read_text().splitlines()
    (root / "train.jsonl").write_text("\n".join(rows[:problems]))
    changed = {"train": {"max_steps": 6}, "grpo": {"num_iterations": iterations}, "eval": {"file": None}}
    whole = train(config(base, **changed), root)
    again = config(base, adapter={"name": "again"}, **changed)
    with monkeypatch.context() as patch:
        stop_after(patch, 3, interrupt, RlReporter)
        with pytest.raises(UserError, match="stopped at step 4 of 6"):
            train(again, root)
    resumed = train(again, root, resume=True)
    assert logged(root / "runs" / "again") == logged(root / "runs" / "tiny")
    assert resumed.digest == whole.digest


def test_what_was_learnt_is_kept_when_a_reward_fails(base: Path, root: Path) -> None:
    lines = (
        "calls = []",
        "def late(completions, **_):",
        "    calls.append(1)",
        "    assert len(calls) < 4",
        "    return [1.0] * len(completions)",
    )
    (root / "late_rewards.py").write_text("\n".join(lines))
    late = config(base, grpo={"rewards": ["late_rewards:late"]}, eval={"file": None})
    with pytest.raises(UserError, match=r"A checkpoint of step \d is saved; `preft train --resume`"):
        train(late, root)
    assert list((root / "runs" / "tiny" / "checkpoints").glob("checkpoint-*/trainer_state.json"))


def test_another_trl_is_refused(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(upstream.TESTED, "_generate_single_turn", "another")
    with pytest.raises(UserError, match=r"_generate_single_turn.*trl==1\.16"):
        train(config(base), root)


def test_too_few_problems_for_a_step(base: Path, root: Path) -> None:
    with pytest.raises(UserError, match="there are 8 problems to train on, and a step takes 16"):
        train(config(base, train={"batch_size": 64}), root)


def test_a_reward_that_returns_none_stops_the_first_step(base: Path, root: Path) -> None:
    with pytest.raises(UserError, match=r"tiny_rewards:nothing"):
        train(config(base, grpo={"rewards": ["tiny_rewards:nothing"]}, eval={"file": None}), root)


def test_a_row_without_the_answer_is_named_before_a_model_is_loaded(
    base: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "load_base", lambda *_: pytest.fail("loaded a model"))
    rows = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "1 + 2?"}]
    (root / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    wrong = config(base, grpo={"rewards": ["math"]}, eval={"file": None})
    with pytest.raises(UserError, match=r"train\.jsonl:2") as error:
        train(wrong, root)
    assert "answer" in str(error.value)
    assert any("train.jsonl:2" in problem for problem in plan_train(wrong, root).problems)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"grpo": {"num_generations": 1}}, "train.grpo.num_generations: 1"),
        ({"train": {"batch_size": 6}}, "train.batch_size: a step has 6 answers"),
        ({"grpo": {"num_iterations": 2}, "train": {"save_every": 3}}, "train.save_every: 3 is in the middle"),
        ({"grpo": {"max_completion_length": 1024}}, "leaves no room for a prompt"),
        ({"train": {"packing": True}}, "train.packing: not with train.task: grpo"),
        ({"train": {"early_stopping": 3}}, "train.early_stopping: not with"),
        ({"train": {"num_processes": 2}}, "train.num_processes: not with"),
        ({"adapter": {"dropout": 0.1}}, "adapter.dropout: not with"),
        ({"grpo": {"rollout_url": "http://127.0.0.1:8000"}}, "set train.grpo.rollout_store too"),
        ({"serve": {"max_model_len": 1023}}, "serve.max_model_len: 1023 is less than train.max_length = 1024"),
        (
            {"serve": {"vllm_args": {"max-num-seqs": "x"}}},
            "serve.vllm_args.max-num-seqs: set serve.max_num_seqs instead",
        ),
        ({"serve": {"vllm_args": {"quantization": "fp8"}}}, "serve.vllm_args.quantization: refused"),
        ({"grpo": {"rollout_store": "store"}}, "set train.grpo.rollout_url too"),
    ],
)
def test_settings_that_no_run_can_do(base: Path, root: Path, sections: dict[str, Any], expected: str) -> None:
    wrong = config(base, **sections)
    found = grpo_problems(wrong)
    assert len(found) == 1
    assert expected in found[0]
    with pytest.raises(UserError, match=r"train\.|adapter\.|serve\.") as error:
        train(wrong, root)
    assert error.value.exit_code == 2


def test_settings_of_a_server_are_no_matter_to_an_engine_elsewhere(base: Path) -> None:
    elsewhere = {"rollout_url": "http://127.0.0.1:8000", "rollout_store": "store"}
    assert grpo_problems(config(base, serve={"max_model_len": 8}, grpo=elsewhere)) == []
    assert grpo_problems(config(base, serve={"max_model_len": 1024})) == []


def test_the_store_of_a_server_is_found_from_the_folder_of_the_config(
    base: Path, root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("preft_cli.rl.rollouts.server.ServerRollouts", lambda *args, **more: asked.append((args, more)))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    grpo = {"rollout_url": "http://127.0.0.1:9", "in_flight": "abort"}
    for store, expected in (("store", root / "store"), ("/dev/shm/policy", Path("/dev/shm/policy"))):
        settings = config(base, grpo=grpo | {"rollout_store": store})
        prepared = prepare_rl(settings, root)
        start_rollouts(settings, prepared)
        args, more = asked.pop()
        assert args == ("http://127.0.0.1:9", expected, "tiny", "lorap", prepared.base.fingerprint, "float32")
        assert more == {"in_flight": "abort"}


def test_a_step_without_signal_is_told_with_a_sample(
    base: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "flat_rewards.py").write_text("def flat(completions, **_):\n    return [0.0] * len(completions)\n")
    train(config(base, train={"max_steps": 1}, grpo={"rewards": ["flat_rewards:flat"]}, eval={"file": None}), root)
    told = capsys.readouterr().err
    assert "nothing can be learnt from this step" in told
    assert "an answer:" in told


def test_problems_that_are_made_are_evaluated_while_training(base: Path) -> None:
    made = config(base, train={"eval_every": 5}, grpo={"environment": "gcd"}, eval={"file": None})
    assert made.eval_every == 5
    assert config(base, train={"eval_every": 5}, eval={"file": None}).eval_every is None
