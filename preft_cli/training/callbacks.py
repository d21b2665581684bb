"""What happens between two steps: progress, metrics, held-out loss at checkpoints, Ctrl-C."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from preft_cli.console import Progress
from preft_cli.training.evaluation import HeldOut
from preft_cli.training.interrupt import InterruptRequest
from preft_cli.training.metrics import Metrics
from preft_cli.training.trainer import PromptTrainer


class Reporter(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Shows and records what the Trainer logs."""

    def __init__(
        self, trainer: PromptTrainer, metrics: Metrics, bar: Progress, held_out: HeldOut | None, stop: InterruptRequest
    ) -> None:
        self._trainer = trainer
        self._metrics = metrics
        self._bar = bar
        self._held_out = held_out
        self._stop = stop
        self._started = time.perf_counter()
        self._restart_clock()

    @property
    def seconds(self) -> float:
        """Time since training began."""
        return time.perf_counter() - self._started

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar.update(state.global_step, total=state.max_steps)
        self._started = time.perf_counter()
        self._restart_clock()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar.update(state.global_step)
        if self._stop.requested and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **_: Any
    ) -> None:
        if "loss" not in logs:
            return
        seconds = time.perf_counter() - self._since
        values = {name: float(logs[name]) for name in ("loss", "learning_rate", "grad_norm", "epoch") if name in logs}
        speed = (self._trainer.tokens_seen - self._tokens_before) / seconds
        self._metrics.train(state.global_step, **values, tokens_per_s=round(speed, 1))
        self._bar.update(state.global_step, note=f"loss {values['loss']:.3f}, {speed:.0f} tok/s")
        self._restart_clock()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Held-out loss at each checkpoint on the way; the last one is measured when training has ended."""
        if self._held_out and state.global_step < state.max_steps and not self._stop.requested:
            self._metrics.evaluation(state.global_step, "adapter", self._held_out.measure())
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._since = time.perf_counter()
        self._tokens_before = self._trainer.tokens_seen
