"""The folder of one run, and when it may be written to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from engine_patch.store.atomic import atomic_write
from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.rl.result import RlResult, parse_result
from preft_cli.training.lock import NAME
from preft_cli.training.result import TrainResult

# What may differ between a run and its continuation without making it another run. Where evaluations hang on `save_every`,
# it counts as the `eval_every` that it stands for.
HARMLESS = {"log_every", "save_every", "gradient_checkpointing", "output_dir", "report_to"}
LENGTH = {"epochs", "max_steps"}
# The sections that decide what is trained; of `project` only the seed does.
DECISIVE = ("project", "model", "adapter", "train")
EVAL_FILE, EVAL_EVERY = "eval.file", "train.eval_every (default: save_every)"


class RunFolder:
    """Where everything of a run lies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "preft.resolved.yaml"
        self.metrics = path / "metrics.jsonl"
        self.plot = path / "loss.png"
        self.curves = path / "curves.png"
        """Of an RL run."""
        self.result = path / "result.json"
        self.adapter = path / "adapter"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.log = path / "train.log"
        self.lock = path / NAME

    def check(self, config: PreftConfig, *, resume: bool, overwrite: bool) -> None:
        """Refuse what would mix two runs or destroy something.

        Raises:
            UserError: the folder is in use and neither `resume` nor `overwrite` is given, or it does not fit.
        """
        if resume and overwrite:
            raise UserError("--resume continues a run and --overwrite deletes it: give one of them", exit_code=2)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"train.output_dir: {self.path} is a file; name a folder")
        if not self.in_use():
            return
        if not self.config.is_file() and (resume or overwrite):
            raise UserError(
                f"train.output_dir: {self.path} holds files but no run of preft train; it is left alone. "
                "Name another folder."
            )
        if resume:
            self._check_same_run(config)
        elif not overwrite:
            raise UserError(
                f"train.output_dir: {self.path} exists and is not empty. Give --resume to continue that run, "
                "--overwrite to delete it and start anew, or another adapter.name or train.output_dir."
            )

    def prepare(self, config: PreftConfig, *, resume: bool) -> None:
        """Make the folder (emptied of what an earlier run left, unless `resume`) and record the config.

        Only after `check`: what is left then without `overwrite` is of a run that never got anywhere.
        """
        if not resume:
            for path in (self.metrics, self.plot, self.curves, self.result):
                path.unlink(missing_ok=True)
            for folder in (self.adapter, self.checkpoints, self.tensorboard, self.path / "wandb"):
                shutil.rmtree(folder, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_write(self.config, [yaml.safe_dump(_dump(config), sort_keys=False).encode()])

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint. The Trainer writes its state last: without it, saving was cut short."""
        found = [path.parent for path in self.checkpoints.glob("checkpoint-*/trainer_state.json")]
        return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)

    def recorded(self) -> dict[str, Any]:
        """The resolved config of the run that lies here; empty if there is none.

        Raises:
            UserError: the file is damaged.
        """
        if not self.config.is_file():
            return {}
        try:
            found = yaml.safe_load(self.config.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError):
            found = None
        if not isinstance(found, dict) or not all(isinstance(found.get(name), dict) for name in DECISIVE):
            raise UserError(
                f"{self.config} is truncated or damaged, so nobody can tell which settings that run had. "
                "Start anew with --overwrite or another train.output_dir."
            )
        return found

    def is_finished(self, config: PreftConfig) -> bool:
        """Whether the run of exactly this config has ended: with these weights, measured on these held-out rows."""
        return self.result.is_file() and _decisive(self.recorded(), HARMLESS) == _decisive(_dump(config), HARMLESS)

    def read_result(self) -> TrainResult | RlResult:
        """The result of a finished run.

        Raises:
            UserError: it is damaged.
        """
        try:
            return parse_result(self.result.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.result} is damaged; remove it, and --resume makes it anew from the last checkpoint"
            ) from error

    def in_use(self) -> bool:
        """Whether something lies here that could be lost; a run that ended before its first step is nothing."""
        if not self.path.is_dir() or not any(entry not in (self.log, self.lock) for entry in self.path.iterdir()):
            return False
        saved = self.result.exists() or self.adapter.exists() or self.last_checkpoint() is not None
        # Logged steps may be those of a run that goes on at this moment.
        stepped = self.metrics.is_file() and '"kind": "train"' in self.metrics.read_text(encoding="utf-8")
        return saved or stepped or not self.config.is_file()

    def _check_same_run(self, config: PreftConfig) -> None:
        recorded = self.recorded()
        before, now = (_decisive(settings, HARMLESS | LENGTH) for settings in (recorded, _dump(config)))
        if not _evaluates_held_out(recorded):
            del now[EVAL_FILE]  # it is read when training is done
        changed = [f"{key}: {before.get(key)} -> {now.get(key)}" for key in now if before.get(key) != now.get(key)]
        if changed:
            raise UserError(
                f"--resume: {self.path} was trained with other settings: {'; '.join(changed)}. "
                "Set them back, or start anew with --overwrite or another train.output_dir."
            )


def _dump(config: PreftConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _decisive(config: dict[str, Any], free: set[str]) -> dict[str, Any]:
    """The settings that decide what is trained and told, as `section.key`, without those of `train` that are `free`."""
    settings = {"project.seed": config.get("project", {}).get("seed")}
    for section in DECISIVE[1:]:
        kept = {key: value for key, value in config.get(section, {}).items() if section != "train" or key not in free}
        settings |= {f"{section}.{key}": value for key, value in kept.items()}
    settings.pop("train.eval_every", None)
    return settings | {EVAL_EVERY: _deciding_every(config), EVAL_FILE: _eval_file(config)}


def _eval_file(config: dict[str, Any]) -> str | None:
    file: str | None = (config.get("eval") or {}).get("file")
    return file


def _every(config: dict[str, Any]) -> int | None:
    """`PreftConfig.eval_every` of a recorded config, which may be of another version."""
    train = config["train"]
    every: int | None = train.get("eval_every") or train.get("save_every")
    return every if train.get("validation_file") or _eval_file(config) else None


def _deciding_every(config: dict[str, Any]) -> int | None:
    """The same where evaluations decide which adapter is kept, or when to stop."""
    train = config["train"]
    return _every(config) if train.get("keep") != "last" or train.get("early_stopping") else None


def _evaluates_held_out(config: dict[str, Any]) -> bool:
    """Whether the held-out rows are those that are evaluated while training."""
    return _every(config) is not None and not config["train"].get("validation_file")
