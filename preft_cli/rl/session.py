"""One RL run in memory: model, engine, trainer, held-out problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME

from engine_patch.adapter import Adapter
from preft_cli.config.schema import PreftConfig
from preft_cli.console import progress, say
from preft_cli.errors import UserError
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.rl.held_out import HeldOutProblems
from preft_cli.rl.logprobs import Scorer
from preft_cli.rl.prepare import PreparedRl
from preft_cli.rl.reporter import RlReporter
from preft_cli.rl.rewards.score import Scores, score
from preft_cli.rl.rollout import Rollouts, Sampling
from preft_cli.rl.trainer import GrpoTrainer, grpo_arguments
from preft_cli.rl.watch import Watcher
from preft_cli.training.arrange import pair_cost
from preft_cli.training.boards import boards
from preft_cli.training.collate import Collator
from preft_cli.training.interrupt import InterruptedRunError, InterruptRequest
from preft_cli.training.memory import reset_peak_memory
from preft_cli.training.metrics import Metrics
from preft_cli.training.model import load_base, save_adapter
from preft_cli.training.output import RunFolder


class RlSession:
    """The base model with a fresh adapter on it, what samples its answers, and the trainer around both."""

    def __init__(
        self,
        config: PreftConfig,
        prepared: PreparedRl,
        folder: RunFolder,
        rollouts: Rollouts,
        resumed_at: Path | None = None,
    ) -> None:
        """`resumed_at`: the checkpoint from which `fit` will go on."""
        self.config, self.prepared, self.folder = config, prepared, folder
        self.metrics = Metrics(folder.metrics)
        self.metrics.rewind(int(resumed_at.name.rpartition("-")[2]) if resumed_at else 0)
        self.seconds = 0.0
        self.base_solved: list[bool] | None = None
        self._solved: tuple[int, list[bool]] | None = None
        self.scores = Scores([], {}, [])
        """Of the last answers."""
        arguments = grpo_arguments(config, folder.checkpoints, prepared.precision)
        self.rollouts = rollouts
        with progress(f"loading {prepared.base.name}"):
            base = load_base(prepared, arguments.device)
        set_seed(config.project.seed)
        self.adapted = AdaptedModel(base, config.adapter, prepared.targets)
        collate = Collator(share_prompts=prepared.apart.share_prompts, pair_cost=pair_cost(prepared.base.hf_config))
        sampling = sampling_of(config, prepared)
        self.trainer = GrpoTrainer(
            self.adapted,
            Scorer(self.adapted, collate, sampling),
            self.rollouts,
            prepared.train.prompts,
            self._judge,
            sampling,
            arguments,
            config.train.grpo.beta,
            processing_class=prepared.tokenizer,
            callbacks=boards(prepared.boards, config, folder),
        )
        self.trainer.keep_by(self._save_checkpoint, self._load_checkpoint, self._evaluate)
        self.trainer.remove_callback(PrinterCallback)
        self.held_out = (
            HeldOutProblems(prepared.held_out, prepared.rewards, self.rollouts, sampling, prepared.tokenizer)
            if prepared.held_out
            else None
        )
        self.watcher = Watcher(self.metrics, config.train.grpo.max_completion_length)

    @property
    def step(self) -> int:
        """Optimizer steps done so far, those before a resume included."""
        return int(self.trainer.state.global_step)

    def measure_base(self) -> None:
        """The base model's accuracy, before the first step."""
        if self.held_out:
            self.trainer.sync_weights()
            self.base_solved = self.held_out.solved("base model", adapted=False)
            self.metrics.accuracy(0, "base", sum(self.base_solved), len(self.base_solved))

    def fit(self, checkpoint: Path | None) -> None:
        """Train to the end, from `checkpoint` if there is one.

        Raises:
            UserError: the checkpoint is damaged or does not fit, the engine failed, or a reward did.
            NonFiniteError: the weights are then those of the last good step.
            InterruptedRunError: Ctrl-C; a checkpoint has been saved.
        """
        trainer = self.trainer
        reset_peak_memory(self.prepared.precision.device)
        if checkpoint and self._is_over(checkpoint):
            return
        with InterruptRequest() as stop, progress("training", unit="steps", total=trainer.args.max_steps) as bar:
            reporter = RlReporter(self, bar, stop)
            trainer.add_callback(reporter)
            try:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            finally:
                trainer.remove_callback(reporter)
                self.seconds = reporter.seconds
            if self.step < trainer.state.max_steps:
                raise InterruptedRunError(f"at step {self.step} of {trainer.state.max_steps}")

    def checkpoint(self) -> int | None:
        """Save a checkpoint of the last step that was done, unless there is one; which step that is, or None."""
        if self.step and self.folder.last_checkpoint() != self.folder.checkpoints / f"checkpoint-{self.step}":
            self.trainer._save_checkpoint(self.trainer.model, None)
        return self.step or None

    def save(self, folder: Path, **about: Any) -> Adapter:
        """Write the adapter as it is now, with where it comes from."""
        return save_adapter(folder, self.config, self.prepared, self.adapted, steps=self.step, **about)

    def solved(self) -> list[bool]:
        """Which held-out problems the adapter solves as it is now."""
        assert self.held_out is not None
        if self._solved and self._solved[0] == self.step:
            return self._solved[1]
        self.trainer.sync_weights()
        found = self.held_out.solved(f"adapter of step {self.step}")
        self.metrics.accuracy(self.step, "adapter", sum(found), len(found))
        self._solved = self.step, found
        return found

    def _judge(self, numbers: Sequence[int], completions: Sequence[str]) -> list[float]:
        problems = [self.prepared.train.problems[number] for number in numbers]
        self.scores = score(problems, completions, self.prepared.rewards)
        return self.scores.total

    def _evaluate(self) -> bool:
        if self.held_out:
            self.solved()
        return False

    def _is_over(self, checkpoint: Path) -> bool:
        """Whether nothing is left to train after `checkpoint`; then it is in place."""
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if state.global_step < self.total_steps():
            return False
        self._load_checkpoint(checkpoint)
        self.trainer.state = state
        say(f"training ended at step {self.step} already: what is left is to measure and save its adapter")
        return True

    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        trainer = self.trainer
        return int(trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1])

    def _save_checkpoint(self, checkpoint: Path) -> None:
        self.save(checkpoint / "adapter")
        self.adapted.save_state(checkpoint)
        (checkpoint / PROBLEMS).write_text(self.prepared.train.digest)

    def _load_checkpoint(self, checkpoint: Path) -> None:
        problems = checkpoint / PROBLEMS
        if not problems.is_file() or problems.read_text() != self.prepared.train.digest:
            raise UserError(
                f"--resume: {checkpoint} was trained on other problems than there are now. Put them back, or start anew with "
                "--overwrite"
            )
        self.adapted.load_state(checkpoint)


PROBLEMS = "problems.sha256"
"""In a checkpoint: the digest of the problems that it was trained on."""


def sampling_of(config: PreftConfig, prepared: PreparedRl) -> Sampling:
    """How answers are drawn while training."""
    grpo = config.train.grpo
    stops = tuple(sorted(prepared.template.stop_ids))
    return Sampling(grpo.max_completion_length, grpo.temperature, grpo.top_p, grpo.top_k, grpo.min_p, stops)


def start_rollouts(config: PreftConfig, prepared: PreparedRl) -> Rollouts:
    """An engine in this process, or the server of `train.grpo.rollout_url`.

    Raises:
        UserError: it does not start or does not fit.
    """
    train = config.train
    if train.grpo.rollout_url:
        from preft_cli.rl.rollouts.server import ServerRollouts

        assert prepared.rollout_store is not None  # see `setting_problems`
        return ServerRollouts(
            train.grpo.rollout_url,
            prepared.rollout_store,
            config.adapter.name,
            config.adapter.method,
            prepared.base.fingerprint,
            prepared.precision.name,
            in_flight=train.grpo.in_flight,
        )
    from preft_cli.rl.rollouts.in_process import InProcessRollouts

    return InProcessRollouts(config, prepared, answers=train.batch_size * train.gradient_accumulation_steps)
