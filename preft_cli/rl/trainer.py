"""TRL's GRPOTrainer with our mask, our engine and our checkpoints.

TRL samples by merging an adapter into the base model, which a prefill-only one cannot be, and scores every position of every
row. Here answers come from `Rollouts`, and the prompt of a group is computed once. What else GRPO is, TRL computes: advantages,
clipping, the correction for what engine and trainer compute differently, the KL term.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from preft_cli.config.schema import PreftConfig
from preft_cli.data.turn import Row
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.rl.clock import Clock, now
from preft_cli.rl.logprobs import Scorer
from preft_cli.rl.order import ProblemOrder
from preft_cli.rl.rollout import Rollouts, Sampling, Synced
from preft_cli.training.device import Precision
from preft_cli.training.trainer import AdapterTrainer, common_arguments

with warnings.catch_warnings():
    # It says that it does not know this vLLM, which it is not let near.
    warnings.simplefilter("ignore")
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import split_tensor_dict


@dataclass
class Sampled:
    """What became of one set of problems, for who watches the run."""

    step: int = -1
    """Optimizer steps before."""
    problems: list[int] = field(default_factory=list)
    """Of each answer, the number of its problem."""
    completions: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_tokens: int = 0


Judge = Callable[[Sequence[int], Sequence[str]], list[float]]
"""From problem numbers and answers to rewards."""


class GrpoTrainer(AdapterTrainer, GRPOTrainer):  # type: ignore[misc, unused-ignore]
    """Group relative policy optimization (arXiv 2402.03300) of an adapter."""

    _buffered_inputs: list[dict[str, Any]] | None

    def __init__(
        self,
        adapted: AdaptedModel,
        scorer: Scorer,
        rollouts: Rollouts,
        prompts: Sequence[list[int]],
        judge: Judge,
        sampling: Sampling,
        args: GRPOConfig,
        beta: float,
        **kwargs: Any,
    ) -> None:
        """`prompts`: token ids of each problem; `beta`: weight of the KL term."""
        from datasets import Dataset

        numbers = Dataset.from_dict({"prompt": [str(number) for number in range(len(prompts))]})
        super().__init__(model=adapted.model, reward_funcs=[self._judged], args=args, train_dataset=numbers, **kwargs)
        self.adapted, self.rollouts, self.clock, self.sampled = adapted, rollouts, Clock(), Sampled()
        self._scorer, self._prompts, self._judge, self._sampling = scorer, prompts, judge, sampling
        # With these TRL compares the engine's log-probabilities with the trainer's and corrects for the difference, as it
        # does for its own engine; set before, it would start that one.
        self.use_vllm = self.vllm_importance_sampling_correction = True
        # The reference is this model without its adapter, whatever the method; TRL knows that of LoRA only.
        self.beta, self.ref_model = beta, _Reference() if beta else None
        self._synced_step = -1
        self.synced = Synced("", 0.0, 0)
        """How the present weights came into the engine."""

    @property
    def tokens_seen(self) -> int:
        """Prompt and completion tokens that were sampled and trained on."""
        return int(self.state.num_input_tokens_seen)

    def go_on_from(self, step: int) -> None:
        """Steps that were done before this process began count as done: TRL's own counter starts at 0 again."""
        self._step = step * self.args.gradient_accumulation_steps

    def sync_weights(self) -> None:
        """Let the engine sample with the weights as they are now."""
        if self.state.global_step == self._synced_step:
            return
        with self.clock.part("sync"):
            self.synced = self.rollouts.sync(self.adapted.live_pairs())
        self._synced_step = self.state.global_step

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Counts what is neither sampling nor judging as training."""
        began, before = now(), self.clock.so_far()
        loss: Tensor = super().training_step(*args, **kwargs)
        self.clock.add("training", now() - began - (self.clock.so_far() - before))
        return loss

    def _get_train_sampler(self, dataset: Any = None) -> ProblemOrder:
        arguments = self.args
        return ProblemOrder(
            len(self._prompts),
            arguments.generation_batch_size // self.num_generations,
            self.num_generations,
            self.num_iterations * arguments.steps_per_generation,
            arguments.seed,
            epoch=lambda: int(self.state.epoch or 0),
        )

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """The ids that the server computes for the same messages; TRL would render and tokenise in its own way."""
        self.sampled = Sampled(self.state.global_step, [int(number) for number in prompts])
        return [self._prompts[number] for number in self.sampled.problems], None, {}

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Answers to prompts each of which stands there `num_generations` times."""
        self.sync_weights()
        with self.clock.part("generation"):
            # Another seed for each step, and the same one after a resume.
            seed = self.args.seed * 1_000_003 + self.state.global_step
            groups = self.rollouts.generate(prompt_ids[::num_generations], num_generations, self._sampling, seed)
        answers = [answer for group in groups for answer in group]
        self.sampled.num_tokens = sum(len(answer.token_ids) for answer in answers)
        return [answer.token_ids for answer in answers], [answer.logprobs for answer in answers]

    def _judged(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        # TRL passes on what we gave it; if it had sampled or tokenised by itself, these would be others.
        assert self.sampled.step == self.state.global_step
        assert [int(number) for number in prompts] == self.sampled.problems
        with self.clock.part("rewards"):
            self.sampled.completions = completions
            self.sampled.rewards = self._judge(self.sampled.problems, completions)
        return self.sampled.rewards

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """As upstream, without shuffling answers, so that those of one prompt share its computation.

        All of them are in one optimizer step anyway (`steps_per_generation`).
        """
        every = self.args.steps_per_generation * self.num_iterations
        if self._step % every == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = split_tensor_dict(batch, self.args.steps_per_generation)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """`[rows, logits_to_keep]` of prompts (padded on the left) and completions (padded on the right)."""
        rows = rows_of(input_ids, attention_mask, logits_to_keep)
        of_base = isinstance(model, _Reference)
        found = []
        for start in range(0, len(rows), batch_size or len(rows)):
            part = rows[start : start + (batch_size or len(rows))]
            with self.accelerator.autocast():
                if of_base:
                    with self.adapted.disabled():
                        found.append(self._scorer(part, entropy=compute_entropy))
                else:
                    found.append(self._scorer(part, model, entropy=compute_entropy))
        logprobs = _joined([one.logprobs for one in found], logits_to_keep)
        entropies = [one.entropies for one in found if one.entropies is not None]
        return logprobs, _joined(entropies, logits_to_keep) if entropies else None, None

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Upstream's loss, unless it is no finite number."""
        loss = super().compute_loss(*args, **kwargs)
        self.note_loss(loss)
        return loss

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None: it would say that this is a model of TRL's."""


class _Reference(nn.Module):
    """Stands for the model without its adapter."""


def rows_of(input_ids: Tensor, attention_mask: Tensor, num_completion: int) -> list[Row]:
    """Rows without their padding.

    Args:
        input_ids: `[rows, prompt + completion]`.
        attention_mask: the same shape; 0 where there is padding.
        num_completion: columns of completions.
    """
    split = input_ids.shape[1] - num_completion
    rows = []
    for ids_T, mask_T in zip(input_ids.cpu(), attention_mask.bool().cpu(), strict=True):
        prompt, completion = ids_T[:split][mask_T[:split]], ids_T[split:][mask_T[split:]]
        rows.append(Row(prompt.tolist(), completion.tolist()))
    return rows


def _joined(parts: list[Tensor], width: int) -> Tensor:
    """`[rows, width]` of parts whose longest answers differ in length."""
    return torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


def grpo_arguments(config: PreftConfig, folder: Path, precision: Precision) -> GRPOConfig:
    """Our config in TRL's terms; checkpoints go to `folder`."""
    grpo = config.train.grpo
    arguments = GRPOConfig(
        **common_arguments(config, folder, precision) | {"logging_steps": 1},
        num_generations=grpo.num_generations,
        steps_per_generation=config.train.gradient_accumulation_steps,
        num_iterations=grpo.num_iterations,
        max_completion_length=grpo.max_completion_length,
        temperature=grpo.temperature,
        loss_type=grpo.loss,
        scale_rewards=grpo.scale_rewards,
        beta=0.0,  # see `GrpoTrainer`
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon_high,
        vllm_importance_sampling_mode=grpo.importance_sampling,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
