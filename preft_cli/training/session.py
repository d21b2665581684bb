"""One training run in memory: model, trainer, held-out data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PrinterCallback, set_seed

from engine_patch.adapter import Adapter
from preft_cli.adapters.folder import save_trained
from preft_cli.config.schema import PreftConfig
from preft_cli.console import progress
from preft_cli.data.tokenise import TokenisedRows
from preft_cli.methods import parts_of
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.models.quiet import quiet_transformers
from preft_cli.training.callbacks import Reporter
from preft_cli.training.collate import Collator
from preft_cli.training.evaluation import HeldOut
from preft_cli.training.interrupt import InterruptedRunError, InterruptRequest
from preft_cli.training.metrics import Metrics
from preft_cli.training.objective import Objective
from preft_cli.training.output import RunFolder
from preft_cli.training.prepare import Prepared
from preft_cli.training.trainer import PromptTrainer, training_arguments


class Session:
    """The base model with a fresh adapter on it, and the trainer around both."""

    def __init__(self, config: PreftConfig, prepared: Prepared, folder: RunFolder) -> None:
        self.config = config
        self.prepared = prepared
        self.folder = folder
        self.metrics = Metrics(folder.metrics)
        self.seconds = 0.0
        with progress(f"loading {prepared.base.name}"):
            base = load_base(prepared)
        set_seed(config.project.seed)
        self.adapted = AdaptedModel(base, config.adapter, prepared.targets)
        objective = Objective(self.adapted)
        collate = Collator()
        self.trainer = PromptTrainer(
            objective=objective,
            save_weights=self._save_checkpoint,
            load_weights=self.adapted.load_state,
            model=self.adapted.model,
            args=training_arguments(config, folder.checkpoints, prepared.precision),
            data_collator=collate,
            train_dataset=prepared.train.rows,
        )
        # It prints the bare dictionaries that our own reporter shows as a bar and writes to a file.
        self.trainer.remove_callback(PrinterCallback)

        def measured_on(data: TokenisedRows | None) -> HeldOut | None:
            size, precision = config.eval.batch_size, prepared.precision
            return HeldOut(data.rows, size, objective, self.adapted, precision, collate) if data else None

        self.held_out = measured_on(prepared.held_out)
        self.validation = measured_on(prepared.validation)

    @property
    def step(self) -> int:
        """Optimizer steps done so far, those before a resume included."""
        return int(self.trainer.state.global_step)

    def fit(self, checkpoint: Path | None) -> None:
        """Train to the end, from `checkpoint` if there is one.

        Raises:
            NonFiniteError: the weights are then those of the last good step.
            InterruptedRunError: Ctrl-C; a checkpoint has been saved.
        """
        trainer = self.trainer
        with InterruptRequest() as stop, progress("training", unit="steps", total=self._total_steps()) as bar:
            reporter = Reporter(trainer, self.metrics, bar, self.held_out, stop)
            trainer.add_callback(reporter)
            try:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            finally:
                trainer.remove_callback(reporter)
                self.seconds = reporter.seconds
            if self.step < trainer.state.max_steps:
                raise InterruptedRunError(f"at step {self.step} of {trainer.state.max_steps}")

    def save(self, folder: Path, **meta: Any) -> Adapter:
        """Write the adapter as it is now, with where it comes from, to the folder of a trained adapter."""
        config, prepared = self.config.adapter, self.prepared
        settings = {part.name: part.settings(config, prepared.targets[part.name]) for part in parts_of(config.method)}
        adapter = Adapter(config.method, prepared.base.fingerprint, self.adapted.pairs(), self._meta() | meta)
        save_trained(folder, adapter, settings, name=config.name)
        return adapter

    def _save_checkpoint(self, checkpoint: Path) -> None:
        """The adapter for use, and the parameters as they are trained, from which a resumed run goes on."""
        self.save(checkpoint / "adapter")
        self.adapted.save_state(checkpoint)

    def _total_steps(self) -> int:
        trainer = self.trainer
        return int(trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1])

    def _meta(self) -> dict[str, Any]:
        """What the server must do alike, and provenance."""
        prepared = self.prepared
        return {
            "base_model": prepared.base.name,
            "chat_template_digest": prepared.template.digest,
            "chat_template_kwargs": {},
            "bos_policy": {"chat": "written by the chat template", "text": "added by the tokenizer"},
            "bos_token": prepared.tokenizer.bos_token,
            "end_of_turn_id": prepared.template.end_of_turn_id,
            "steps": self.step,
            "seed": self.config.project.seed,
            "dtype": prepared.precision.name,
        }


def load_base(prepared: Prepared) -> Any:
    """The base model in the compute type: the weights that a server of that type computes with."""
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(prepared.base.path, dtype=prepared.precision.dtype)
