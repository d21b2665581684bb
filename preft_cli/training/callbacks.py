"""What happens between two steps: progress, metrics, Ctrl-C, and when to evaluate."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from preft_cli.console import Progress
from preft_cli.training import processes
from preft_cli.training.interrupt import InterruptRequest
from preft_cli.training.metrics import Metrics
from preft_cli.training.trainer import PromptTrainer


class Reporter(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Shows and records what the Trainer logs."""

    def __init__(
        self, trainer: PromptTrainer, metrics: Metrics, bar: Progress, eval_every: int | None, stop: InterruptRequest
    ) -> None:
        """`eval_every`: steps between two evaluations, and one at the end; None: none at all."""
        self._trainer = trainer
        self._metrics = metrics
        self._bar = bar
        self._eval_every = eval_every
        self._stop = stop
        self._started = self._step_began = time.perf_counter()
        self.step_seconds = 0.0
        """Time within steps: without evaluations and checkpoints."""
        self._restart_clock()

    @property
    def seconds(self) -> float:
        """Time since training began."""
        return time.perf_counter() - self._started

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar.update(state.global_step, total=state.max_steps)
        self._started = time.perf_counter()
        self._restart_clock()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._step_began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.step_seconds += time.perf_counter() - self._step_began
        self._bar.update(state.global_step)
        last = state.global_step >= state.max_steps
        if self._eval_every and (last or state.global_step % self._eval_every == 0):
            # Also when a stop is requested: a run that goes on from here must have seen what an undisturbed one saw.
            control.should_evaluate = True
        if processes.any_of(self._stop.requested) and not last and self._may_stop(state.global_step):
            control.should_save = control.should_training_stop = True

    def _may_stop(self, step: int) -> bool:
        """Whether a run can go on from here as if it had not stopped."""
        return True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" not in logs:
            return
        seconds = time.perf_counter() - self._since
        values = {name: float(logs[name]) for name in ("loss", "learning_rate", "grad_norm", "epoch") if name in logs}
        speed = processes.total(self._trainer.tokens_seen - self._tokens_before) / seconds
        self._metrics.train(state.global_step, **values, tokens_per_s=round(speed, 1))
        self._bar.update(state.global_step, note=f"loss {values['loss']:.3f}, {speed:.0f} tok/s")
        self._restart_clock()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Neither saving nor evaluating, which comes before it, counts as time of the next step."""
        self._restart_clock()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._since = time.perf_counter()
        self._tokens_before = self._trainer.tokens_seen
