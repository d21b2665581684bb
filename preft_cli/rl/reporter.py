"""From what TRL logs and the clock has counted to one `StepStats` for each optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from preft_cli.console import Progress
from preft_cli.rl.clock import now
from preft_cli.rl.stats import Sample, StepStats
from preft_cli.training.callbacks import Reporter
from preft_cli.training.interrupt import InterruptRequest

if TYPE_CHECKING:
    from preft_cli.rl.session import RlSession

NAMES = {
    "kl": "kl",
    "clip_ratio": "clip_ratio/region_mean",
    "entropy": "entropy",
    "ratio_mean": "sampling/importance_sampling_ratio/mean",
    "logprob_gap_mean": "sampling/sampling_logp_difference/mean",
    "logprob_gap_max": "sampling/sampling_logp_difference/max",
    "grad_norm": "grad_norm",
}
"""Fields of `StepStats` and TRL's names for them."""


class RlReporter(Reporter):
    """Hands each step to the watcher."""

    def __init__(self, session: RlSession, bar: Progress, stop: InterruptRequest) -> None:
        trainer = session.trainer
        super().__init__(trainer, session.metrics, bar, session.config.eval_every, stop)
        self._session = session
        self._optimizer_began = 0.0
        self._logged: dict[str, Any] = {}
        """TRL logs what belongs to the answers only in the step that sampled them."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        super().on_train_begin(args, state, control)
        self._session.trainer.go_on_from(state.global_step)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._session.trainer.clock.take()
        self._step_began = now()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._optimizer_began = now()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        ended = now()
        self._session.trainer.clock.add("training", ended - self._optimizer_began)
        self._session.trainer.clock.add("total", ended - self._step_began)
        super().on_step_end(args, state, control)

    def _may_stop(self, step: int) -> bool:
        """Not while answers are left that further iterations need: checkpoints do not hold them."""
        return step % self._session.config.train.grpo.num_iterations == 0

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" not in logs:
            return
        self._logged |= logs
        note = self._session.watcher.step(self._stats(state.global_step, logs), self._sample())
        self._bar.update(state.global_step, note=note)

    def _stats(self, step: int, logs: dict[str, Any]) -> StepStats:
        trainer, scores = self._session.trainer, self._session.scores
        seconds, sampled = trainer.clock.take(), trainer.sampled
        found = self._logged
        known: dict[str, Any] = {field: logs.get(name) for field, name in NAMES.items()}
        fresh = sampled.step == step - 1
        # An evaluation may have brought the weights before the step began.
        before = trainer.synced.seconds if fresh and "sync" not in seconds else 0.0
        return StepStats(
            step=step,
            reward_mean=found["reward"],
            reward_std=found["reward_std"],
            reward_low=min(sampled.rewards),
            reward_high=max(sampled.rewards),
            rewards={name: _mean(values) for name, values in scores.parts.items()},
            solved_share=sum(scores.solved) / len(scores.solved),
            tied_share=found["frac_reward_zero_std"],
            length_mean=found["completions/mean_length"],
            cut_share=found["completions/clipped_ratio"],
            loss=logs["loss"],
            learning_rate=logs["learning_rate"],
            **known,
            generated_tokens=sampled.num_tokens if fresh else 0,
            **{f"seconds_{part}": seconds.get(part, 0.0) for part in ("generation", "rewards", "training")},
            seconds_sync=seconds.get("sync", before),
            seconds_total=seconds["total"] + before,
            sync_bytes=trainer.synced.num_bytes if fresh else 0,
        )

    def _sample(self) -> Sample:
        """The longest answer of the step."""
        session, sampled = self._session, self._session.trainer.sampled
        at = max(range(len(sampled.completions)), key=lambda number: len(sampled.completions[number]))
        number = sampled.problems[at]
        train = session.prepared.train
        prompt = session.prepared.tokenizer.decode(train.prompts[number])
        return Sample(prompt, sampled.completions[at], sampled.rewards[at], train.problems[number].answer)


def _mean(values: list[float | None]) -> float:
    """Of the answers to which the reward applies; 0 if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
