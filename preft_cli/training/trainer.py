"""Transformers' Trainer with our objective, our checkpoints, and a stop before a bad step does harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerControl, TrainingArguments

from preft_cli.config.schema import PreftConfig
from preft_cli.training import processes
from preft_cli.training.device import Precision
from preft_cli.training.objective import Objective
from preft_cli.training.order import Order, WithBlank, shared_groups
from preft_cli.training.sharding import average_gradients

NEVER = 10**9


class NonFiniteError(Exception):
    """The loss or the gradient is NaN or infinite. The weights are still those of the last good step."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(f"{what} is not a finite number in step {step}")
        self.step = step


class AdapterTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A Trainer, of whatever task, whose checkpoints hold our adapter and which never takes a step that is not finite."""

    control: TrainerControl

    def keep_by(
        self,
        save_weights: Callable[[Path], object],
        load_weights: Callable[[Path], None],
        evaluate: Callable[[], bool],
    ) -> None:
        """How adapters are written and read; `evaluate` measures the present one and tells whether to stop early."""
        self._save_weights = save_weights
        self._load_weights = load_weights
        self._evaluate_now = evaluate
        self._finite = True

    def note_loss(self, loss: Tensor) -> None:
        """Remember whether it is finite.

        Raises:
            NonFiniteError: it is not, and nobody waits for this process.
        """
        self._finite = self._finite and bool(torch.isfinite(loss))
        if not self._finite and self.args.world_size == 1:
            raise NonFiniteError("the loss", self.state.global_step + 1)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        # A process that raised alone would leave the others waiting in the backward pass.
        if processes.any_of(not self._finite):
            raise NonFiniteError("the loss", self.state.global_step + 1)
        norm = super()._clip_grad_norm(model)
        # With float16 the loss scaler meets infinities as a matter of course, and skips those steps itself.
        if not self.args.fp16 and not torch.isfinite(torch.as_tensor(norm)):
            raise NonFiniteError("the gradient", self.state.global_step + 1)
        return norm

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Leaves one step after the warm-up, which begins with a step of rate 0: else a run of one step would train nothing."""
        if self.args.get_warmup_steps(num_training_steps) >= num_training_steps:
            self.args.warmup_steps = num_training_steps - 1
        return super().create_scheduler(num_training_steps, optimizer)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """In place of the base class's loop, which averages the means of batches."""
        control = self.control
        if self._evaluate_now():
            control.should_training_stop = control.should_save = True
        self.control = self.callback_handler.on_evaluate(self.args, self.state, control, metrics={})
        return {}

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Without what stands for an orthogonal matrix: it has no size that could decay, and signs that would be lost."""
        return [name for name in super().get_decay_parameter_names(model) if "parametrizations" not in name.split(".")]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # Not PEFT's files: a stock loader would apply a prefill-only adapter to all tokens.
        self._save_weights(Path(output_dir or str(self.args.output_dir)))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The main process marks the checkpoint as complete after this, which holds a file of each process.
        processes.total(0)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_weights(Path(resume_from_checkpoint))


class PromptTrainer(AdapterTrainer):
    """Supervised finetuning on the completion, the adapter on the prompt."""

    # `compute_loss` divides by the tokens of all accumulated batches, hence must not be divided again.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        objective: Objective,
        train_dataset: Sequence[Any],
        share_prompts: bool = False,
        sharded: bool = False,
        **kwargs: Any,
    ) -> None:
        """Trains on rows, or with packing on sequences of rows; `sharded`: see `sharding`."""
        super().__init__(train_dataset=WithBlank(train_dataset), **kwargs)
        self.model_accepts_loss_kwargs = True  # makes the base class count the labels of all accumulated batches
        self.objective = objective
        self.tokens_seen = 0
        self._share_prompts = share_prompts
        self._sharded = sharded
        if sharded:
            # Accelerate would put DDP around it, which takes no shards; `_clip_grad_norm` does DDP's part.
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """With `share_prompts` the rows of one prompt follow each other."""
        rows, arguments = self.train_dataset.rows, self.args
        return Order(
            shared_groups(rows) if self._share_prompts else [[[number]] for number in range(len(rows))],
            arguments.train_batch_size,
            arguments.seed,
            epoch=lambda: int(self.state.epoch or 0),
            num_processes=arguments.world_size,
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean cross-entropy over the completion tokens of the whole optimizer step, in all processes."""
        loss = self.objective(inputs, model)
        self.tokens_seen += int(inputs["row_tokens"].sum())
        self.note_loss(loss.total)
        mean = loss.total / (loss.num_tokens if num_items_in_batch is None else num_items_in_batch)
        # The count is that of all processes, whose gradients are averaged, not summed.
        mean = mean * self.args.world_size
        return (mean, None) if return_outputs else mean

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self._sharded:
            average_gradients(model)
        return super()._clip_grad_norm(model)


def training_arguments(config: PreftConfig, folder: Path, precision: Precision) -> TrainingArguments:
    """Our config in the Trainer's terms; checkpoints go to `folder`."""
    arguments = TrainingArguments(**common_arguments(config, folder, precision))
    # One process drives one GPU: the Trainer would split batches over all it sees, and the mask with them.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def common_arguments(config: PreftConfig, folder: Path, precision: Precision) -> dict[str, Any]:
    """What all trainers are told alike, by Transformers' names."""
    train = config.train
    return {
        "output_dir": str(folder),
        "num_train_epochs": train.epochs,
        "max_steps": train.max_steps or -1,
        "per_device_train_batch_size": train.batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "optim": "adamw_torch",
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": "cosine",
        # From 1 on the Trainer reads a number of steps; a share of 1 is all of them.
        "warmup_steps": min(train.warmup_ratio, 1 - 1e-9),
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "seed": config.project.seed,
        "data_seed": config.project.seed,
        "bf16": precision.name == "bfloat16",
        "fp16": precision.name == "float16",
        "use_cpu": precision.device == "cpu",
        "gradient_checkpointing": train.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "logging_strategy": "steps",
        "logging_steps": train.log_every,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": train.save_every or NEVER,
        "save_total_limit": 2,
        "eval_strategy": "no",
        "report_to": "none",  # `boards` brings the callbacks
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": precision.device == "cuda",
    }
