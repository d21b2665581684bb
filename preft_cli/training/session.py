"""One training run in memory: model, trainer, held-out data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME

from engine_patch.adapter import Adapter
from preft_cli.config.schema import PreftConfig
from preft_cli.console import progress, say
from preft_cli.data.tokenise import TokenisedRows
from preft_cli.errors import UserError
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.training import processes
from preft_cli.training.arrange import pair_cost
from preft_cli.training.beside import rows_digest
from preft_cli.training.best import Best
from preft_cli.training.boards import boards
from preft_cli.training.callbacks import Reporter
from preft_cli.training.collate import Collator
from preft_cli.training.evaluation import HeldOut
from preft_cli.training.interrupt import InterruptedRunError, InterruptRequest
from preft_cli.training.memory import reset_peak_memory
from preft_cli.training.metrics import Metrics
from preft_cli.training.model import load_base, save_adapter
from preft_cli.training.objective import Objective
from preft_cli.training.output import RunFolder
from preft_cli.training.prepare import Prepared
from preft_cli.training.sharding import shard_base
from preft_cli.training.splits import HELD_OUT, VALIDATION, Splits
from preft_cli.training.trainer import PromptTrainer, training_arguments

ROWS = "rows.sha256"
"""In a checkpoint: the digest of the rows that it was trained on."""


class Session:
    """The base model with a fresh adapter on it, and the trainer around both."""

    def __init__(self, config: PreftConfig, prepared: Prepared, folder: RunFolder) -> None:
        self.config = config
        self.prepared = prepared
        self.folder = folder
        self.metrics = Metrics(folder.metrics, writes=processes.is_main())
        self.seconds = self.step_seconds = 0.0
        self.stopped_early = False
        # Reading the device connects the processes, and gives each its own.
        arguments = training_arguments(config, folder.checkpoints, prepared.precision)
        device = arguments.device
        callbacks = boards(prepared.boards, config, folder)
        sharded = config.train.parallel == "fsdp" and processes.world_size() > 1
        with progress(f"loading {prepared.base.name}"):
            base = load_base(prepared, torch.device("cpu") if sharded else device, config.train.quantize_base)
        set_seed(config.project.seed)
        self.adapted = AdaptedModel(base, config.adapter, prepared.targets)
        objective = Objective(self.adapted)
        share = prepared.apart.share_prompts
        collate = Collator(
            side=config.train.padding_side, share_prompts=share, pair_cost=pair_cost(prepared.base.hf_config)
        )
        if sharded:
            shard_base(self.adapted.model, device)
        self.trainer = PromptTrainer(
            objective=objective,
            sharded=sharded,
            model=self.adapted.model,
            args=arguments,
            data_collator=collate,
            train_dataset=prepared.sequences or prepared.train.rows,
            share_prompts=share and not prepared.sequences,
            callbacks=callbacks,
        )
        self.trainer.keep_by(self._save_checkpoint, self._load_checkpoint, self._evaluate)
        # It prints the bare dictionaries that our own reporter shows as a bar and writes to a file.
        self.trainer.remove_callback(PrinterCallback)

        def measured(name: str, data: TokenisedRows) -> HeldOut:
            return HeldOut(
                data.rows, config.eval.batch_size, objective, self.adapted, prepared.precision, collate, name
            )

        found = {VALIDATION: prepared.validation, HELD_OUT: prepared.held_out}
        self.splits = Splits(
            {name: measured(name, data) for name, data in found.items() if data}, self.metrics, self.trainer.log
        )
        choosing = found.get(self.splits.choosing or "")
        self.best = Best(rows_digest(choosing.rows) if choosing else None)

    @property
    def step(self) -> int:
        """Optimizer steps done so far, those before a resume included."""
        return int(self.trainer.state.global_step)

    def fit(self, checkpoint: Path | None) -> None:
        """Train to the end, from `checkpoint` if there is one.

        Raises:
            UserError: the checkpoint is damaged or does not fit.
            NonFiniteError: the weights are then those of the last good step.
            InterruptedRunError: Ctrl-C; a checkpoint has been saved.
        """
        trainer, total = self.trainer, self._total_steps()
        reset_peak_memory(self.prepared.precision.device)
        if checkpoint and self._is_over(checkpoint, total):
            return
        with InterruptRequest() as stop, progress("training", unit="steps", total=total) as bar:
            reporter = Reporter(trainer, self.metrics, bar, self.config.eval_every, stop)
            trainer.add_callback(reporter)
            try:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            finally:
                trainer.remove_callback(reporter)
                self.seconds, self.step_seconds = reporter.seconds, reporter.step_seconds
            if self.step < trainer.state.max_steps and not self.stopped_early:
                raise InterruptedRunError(f"at step {self.step} of {trainer.state.max_steps}")

    @property
    def kept_step(self) -> int:
        """The step whose adapter the run leaves, if it ends now."""
        best = None if self.config.train.keep == "last" else self.best.step
        return self.step if best is None else best

    @property
    def chosen_on(self) -> Any:
        """The split that decided which adapter is kept, or when to stop; None: nothing was decided on the way."""
        decides = self.config.train.keep != "last" or self.config.train.early_stopping
        return self.splits.choosing if self.best.step is not None and decides else None

    def keep(self) -> int:
        """Put the adapter in place that the run leaves, and tell of which step it is."""
        if self.kept_step != self.step:
            self.adapted.put(self.best.state)
        return self.kept_step

    def save(self, folder: Path, step: int | None = None, **meta: Any) -> Adapter:
        """Write the adapter as it is now (of `step`, if not of the last one), with where it comes from."""
        steps = self.step if step is None else step
        return save_adapter(folder, self.config, self.prepared, self.adapted, steps=steps, **meta)

    def _evaluate(self) -> bool:
        """Let the adapter as it is now compete with the best one; true when patience is at its end."""
        name = self.splits.choosing
        if name is None:
            return False
        loss = self.splits.adapter(name, self.step, while_training=True)
        self.best.offer(self.step, loss, self.adapted.state)
        self.stopped_early = self._out_of_patience()
        return self.stopped_early

    def _out_of_patience(self) -> bool:
        return self.best.misses >= (self.config.train.early_stopping or math.inf)

    def _is_over(self, checkpoint: Path, total: int) -> bool:
        """Whether nothing is left to train after `checkpoint`, which is that of the last step; then it is in place.

        The Trainer would go on: it looks for the last step, and for a stop, only when it has done one more.
        """
        self._load_checkpoint(checkpoint)
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if not self.stopped_early and state.global_step < total:
            return False
        self.trainer.state = state
        how = "stopped early" if self.stopped_early else "ended"
        say(f"training {how} at step {self.step} already: what is left is to measure and save its adapter")
        return True

    def _save_checkpoint(self, checkpoint: Path) -> None:
        """The adapter for use, and what a resumed run goes on from: the parameters as they are trained, and the best."""
        self.save(checkpoint / "adapter")
        self.adapted.save_state(checkpoint)
        self.best.save(checkpoint)
        (checkpoint / ROWS).write_text(rows_digest(self.prepared.train.rows))

    def _load_checkpoint(self, checkpoint: Path) -> None:
        rows = checkpoint / ROWS
        if not rows.is_file() or rows.read_text() != rows_digest(self.prepared.train.rows):
            raise UserError(
                f"--resume: {checkpoint} was trained on other rows than those of train.file now. Put the rows back, or start "
                "anew with --overwrite"
            )
        self.adapted.load_state(checkpoint)
        self.best.load(checkpoint)
        self.stopped_early = self._out_of_patience()
        if self.splits.choosing and self.best.last:
            self.splits.remember(self.splits.choosing, *self.best.last)
        if self.splits.choosing and self.best.step is not None:
            self.splits.remember(self.splits.choosing, self.best.step, self.best.loss)

    def _total_steps(self) -> int:
        trainer = self.trainer
        return int(trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1])
