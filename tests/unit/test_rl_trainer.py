"""GRPO steps on a tiny model: what TRL is handed and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from preft_cli.adapters.base import BaseFacts
from preft_cli.config.schema import AdapterConfig, PreftConfig
from preft_cli.data.turn import Row
from preft_cli.methods import parts_of
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.models import resolve
from preft_cli.rl.logprobs import Scorer, kept
from preft_cli.rl.rollout import Sampling
from preft_cli.rl.trainer import GrpoTrainer, grpo_arguments, rows_of
from preft_cli.training.collate import Collator
from preft_cli.training.device import Precision
from tests.unit.rl_rollouts import ReferenceRollouts

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[10, 20, 30, 40], [11, 21, 31], [12, 22], [13, 23, 33, 43, 53]]
GRPO = {"num_generations": 4, "max_completion_length": 6}
TRAIN = {"task": "grpo", "batch_size": 8, "learning_rate": 0.05, "max_steps": 3, "warmup_ratio": 0}


def settings(method: str = "lorap", train: dict[str, Any] | None = None, **grpo: Any) -> PreftConfig:
    return PreftConfig.model_validate(
        {
            "adapter": {"method": method, "rank": 4},
            "train": TRAIN | (train or {}) | {"grpo": GRPO | grpo},
        }
    )


def adapted_model(base: Path, config: AdapterConfig) -> AdaptedModel:
    model = resolve(str(base), base)
    facts = BaseFacts.of(model, False)
    targets = {part.name: part.targets(config, facts) for part in parts_of(config.method)}
    torch.manual_seed(0)
    return AdaptedModel(AutoModelForCausalLM.from_pretrained(base), config, targets)


def sampling_of(config: PreftConfig) -> Sampling:
    grpo = config.train.grpo
    return Sampling(grpo.max_completion_length, grpo.temperature, grpo.top_p, grpo.top_k, grpo.min_p, (2,))


def many_even(numbers: Sequence[int], completions: Sequence[str]) -> list[float]:
    """A reward that answers can earn by chance."""
    return [sum(map(len, text.split())) % 7 / 7 for text in completions]


class Logs(TrainerCallback):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        self.rows.append(dict(logs))


class Run:
    """A trainer with rollouts from the reference."""

    def __init__(self, base: Path, folder: Path, config: PreftConfig, judge: Callable[..., list[float]] = many_even):
        self.adapted = adapted_model(base, config.adapter)
        fingerprint = resolve(str(base), base).fingerprint
        self.rollouts = ReferenceRollouts(base, config.adapter.method, fingerprint)
        self.logs, sampling = Logs(), sampling_of(config)
        scorer = Scorer(self.adapted, Collator(share_prompts=config.train.share_prompts, pair_cost=0.1), sampling)
        self.trainer = GrpoTrainer(
            self.adapted,
            scorer,
            self.rollouts,
            PROMPTS,
            judge,
            sampling,
            grpo_arguments(config, folder, Precision("cpu", torch.float32)),
            config.train.grpo.beta,
            processing_class=AutoTokenizer.from_pretrained(base),
            callbacks=[self.logs],
        )
        self.trainer.keep_by(lambda path: path.mkdir(parents=True), lambda _: None, lambda: False)
        self.trainer.remove_callback(PrinterCallback)

    def steps(self) -> list[dict[str, Any]]:
        self.trainer.train()
        return [row for row in self.logs.rows if "reward" in row]


@pytest.mark.parametrize("method", ["lorap", "direftp", "lora", "direft"])
def test_trainer_and_engine_agree_on_every_step(base: Path, tmp_path: Path, method: str) -> None:
    """The weights change greatly from step to step, and each is sampled with those of that step."""
    run = Run(base, tmp_path, settings(method))
    rows = run.steps()
    assert len(rows) == 3
    assert run.rollouts.syncs == 3
    assert len(set(run.rollouts.seeds)) == 3
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert row["grad_norm"] > 0


def test_every_answer_is_scored_as_the_reference_scores_it(base: Path) -> None:
    """Answers of several prompts, shared and padded, at another temperature and with truncation; entropies too."""
    config = settings(temperature=0.6, top_p=0.9, top_k=40, min_p=0.02)
    adapted = adapted_model(base, config.adapter)
    with torch.no_grad():
        for parameter in adapted.trainable().values():
            parameter += 0.3 * torch.randn_like(parameter)
    rollouts = ReferenceRollouts(base, "lorap", resolve(str(base), base).fingerprint)
    rollouts.sync(adapted.live_pairs())
    sampling = sampling_of(config)
    groups = rollouts.generate(PROMPTS, 3, sampling, seed=1)
    # Of different lengths.
    rows = [
        Row(prompt, one.token_ids[: 6 - number])
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for number, one in enumerate(group)
    ]
    expected = [one.logprobs for group in groups for one in group]
    for share in (True, False):
        scored = Scorer(adapted, Collator(share_prompts=share, pair_cost=0.1), sampling)(rows, entropy=True)
        assert scored.entropies is not None
        for row, logprobs, found, entropies in zip(rows, expected, *scored, strict=True):
            length = len(row.completion_ids)
            assert (found[:length] - torch.tensor(logprobs[:length])).abs().max() < 1e-4
            assert not found[length:].any()
            assert (entropies[:length] >= 0).all()


def test_what_could_have_been_drawn() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(4, 1)
    token = torch.zeros(4, dtype=torch.long)
    assert kept(logits, token, Sampling(1, 1.0, top_k=2)).sum(-1).tolist() == [2] * 4
    # Probabilities 0.644, 0.237, 0.087, 0.032.
    assert kept(logits, token, Sampling(1, 1.0, top_p=0.7)).sum(-1).tolist() == [2] * 4
    assert kept(logits, token, Sampling(1, 1.0, top_p=0.6)).sum(-1).tolist() == [1] * 4
    assert kept(logits, token, Sampling(1, 1.0, min_p=0.1)).sum(-1).tolist() == [3] * 4
    drawn = torch.tensor([3, 3, 3, 3])
    assert kept(logits, drawn, Sampling(1, 1.0, top_k=1))[:, 3].all(), "what was drawn is never impossible"


def test_the_reference_of_kl_is_the_model_without_its_adapter(base: Path, tmp_path: Path) -> None:
    """For DiReFT, of which TRL knows nothing; at the first step the adapter is a no-op."""
    rows = Run(base, tmp_path, settings("direftp", beta=0.1)).steps()
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[2]["kl"] > 1e-3


def test_parts_of_a_batch_give_the_gradient_of_the_whole(base: Path, tmp_path: Path) -> None:
    """Accumulation, prompts apart: the same weights after the first step."""
    found = []
    for number, train in enumerate(({}, {"batch_size": 4, "gradient_accumulation_steps": 2}, {"share_prompts": False})):
        run = Run(base, tmp_path / str(number), settings(train=train | {"max_steps": 1}))
        run.steps()
        found.append(run.adapted.state())
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert (tensor - other[name]).abs().max() < 1e-4, name


def test_a_second_iteration_clips_and_samples_nothing(base: Path, tmp_path: Path) -> None:
    run = Run(base, tmp_path, settings(train={"max_steps": 4}, num_iterations=2, epsilon=0.01))
    run.steps()
    assert run.rollouts.syncs == 2
    assert len(run.rollouts.seeds) == 2
    clipped = [row["clip_ratio/region_mean"] for row in run.logs.rows if "clip_ratio/region_mean" in row]
    assert len(clipped) == 4
    assert clipped[0] == 0
    assert clipped[1] > 0


def test_the_reward_rises(base: Path, tmp_path: Path) -> None:
    """Letters are rewarded, and are sampled more and more."""

    def letters(numbers: Sequence[int], completions: Sequence[str]) -> list[float]:
        return [float(text.isalpha()) for text in completions]

    train = {"max_steps": 25, "batch_size": 32, "learning_rate": 0.02}
    run = Run(base, tmp_path, settings(train=train, num_generations=8, max_completion_length=1), letters)
    rewards = [row["reward"] for row in run.steps()]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 5 * 0.25


def test_padding_is_cut_away() -> None:
    ids = torch.tensor([[0, 5, 6, 7, 8, 0], [1, 2, 3, 4, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
    assert [(row.prompt_ids, row.completion_ids) for row in rows_of(ids, mask, 3)] == [
        ([5, 6], [7, 8]),
        ([1, 2, 3], [4]),
    ]
