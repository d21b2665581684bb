"""What `preft train` would do, known without torch or a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from preft_cli.config.schema import PreftConfig
from preft_cli.data.load import data_files, trained_on
from preft_cli.data.read import is_hub_id
from preft_cli.errors import UserError
from preft_cli.training import processes
from preft_cli.training.output import RunFolder

INSTALL = {"tensorboard": "preft[train]", "wandb": "wandb", "bitsandbytes": "bitsandbytes>=0.46"}


class TrainPlan(BaseModel):
    """The resolved run."""

    model_config = ConfigDict(frozen=True)

    base_model: str
    adapter: dict[str, Any]
    train: dict[str, Any]
    seed: int
    train_file: Path | None = Field(
        description="Or a data set of the Hub, owner/name; None: an environment makes the problems."
    )
    eval_file: Path | None = Field(description="As train_file.")
    output_dir: Path
    output_dir_in_use: bool = Field(description="Then --resume or --overwrite is needed.")
    rows: int | None = Field(description="Assistant turns in train_file, or problems, before long ones are dropped.")
    held_out_rows: int | None
    validation_rows: int | None
    rows_per_step: int | None = Field(
        description="Batch size x accumulation x processes; with packing not known before tokenising."
    )
    steps: int | None = Field(
        description="Optimizer steps if no row is dropped; with packing only known if max_steps is set."
    )
    problems: list[str] = Field(
        description="What would stop the run at once, as far as it is known without the base model."
    )


def plan_train(config: PreftConfig, root: Path) -> TrainPlan:
    """The plan for `config`, whose relative paths start at `root`.

    Reads the data files, which brings those of the Hub into its cache, and writes nothing else.
    """
    train, problems = config.train, setting_problems(config)
    counts, unreadable = _counts(config, root)
    problems += unreadable
    rows = counts.get("train.file")
    output = root / config.output_dir
    made = train.task == "grpo" and train.grpo.environment
    return TrainPlan(
        base_model=config.model.base,
        adapter=config.adapter.model_dump(mode="json"),
        train=train.model_dump(mode="json"),
        seed=config.project.seed,
        train_file=None if made else _file(train.file, root),
        eval_file=_file(config.eval.file, root) if config.eval.file and not made else None,
        output_dir=output,
        output_dir_in_use=RunFolder(output).in_use(),
        rows=rows,
        held_out_rows=counts.get("eval.file"),
        validation_rows=counts.get("train.validation_file"),
        rows_per_step=None
        if train.packing
        else train.batch_size * train.gradient_accumulation_steps * train.num_processes,
        steps=train.max_steps or (_steps(config, rows) if rows and not train.packing else None),
        problems=problems,
    )


def _counts(config: PreftConfig, root: Path) -> tuple[dict[str, int], list[str]]:
    """Rows by the key of their file, and what is wrong with files."""
    if config.train.task == "grpo":
        from preft_cli.rl.plan import count_problems

        return count_problems(config, root)
    counts: dict[str, int] = {}
    files = data_files(config, root)
    problems = trained_on(files)
    for setting, file in files.items():
        try:
            counts[setting] = len(file.read())
        except UserError as error:
            problems.append(str(error))
    return counts, problems


def _file(file: Path, root: Path) -> Path:
    return file if is_hub_id(file, root) else root / file


def setting_problems(config: PreftConfig) -> list[str]:
    """Settings that no run can do as they say, known without data, weights or a GPU."""
    if config.train.task == "grpo":
        from preft_cli.rl.plan import grpo_problems

        finds: tuple[Callable[[PreftConfig], str | None], ...] = (_name, _packages)
        return [*grpo_problems(config), *(problem for find in finds if (problem := find(config)))]
    return [problem for find in (_name, _evaluations, _processes, _packages) if (problem := find(config))]


def _name(config: PreftConfig) -> str | None:
    """No server could tell the adapter from the base model."""
    if config.adapter.name != config.model.base:
        return None
    return f"adapter.name: {config.adapter.name!r} is the base model's own name (model.base); choose another one"


def _evaluations(config: PreftConfig) -> str | None:
    """What needs a loss while training, and gets none."""
    train = config.train
    needs = {
        "train.eval_every": train.eval_every is not None,
        "train.early_stopping": train.early_stopping is not None,
        "train.keep: best": train.keep == "best",
    }
    wanting = next((name for name, wants in needs.items() if wants), None)
    if wanting is None or config.eval_every:
        return None
    if not (train.validation_file or config.eval.file):
        return f"{wanting}: there are no rows to evaluate on; set train.validation_file (or eval.file)"
    return f"{wanting}: nothing is evaluated while training; set train.eval_every, in steps"


def _processes(config: PreftConfig) -> str | None:
    train = config.train
    if train.parallel == "fsdp" and train.num_processes == 1:
        return "train.parallel: fsdp shares the base model among processes; set train.num_processes to 2 or more"
    if train.parallel == "fsdp" and train.quantize_base:
        return "train.quantize_base: a quantised base is not shared among processes; use train.parallel: ddp"
    return None


def _packages(config: PreftConfig) -> str | None:
    """What was asked for by name and is not installed."""
    train = config.train
    asked: dict[str, str] = {
        name: "train.report_to" for name in train.report_to if "report_to" in train.model_fields_set
    }
    if train.quantize_base:
        asked["bitsandbytes"] = "train.quantize_base"
    missing = next((name for name in asked if find_spec(name) is None), None)
    if missing is None:
        return None
    return f"{asked[missing]}: {missing} is not installed: pip install '{INSTALL[missing]}', or leave it out"


def as_launched(config: PreftConfig) -> PreftConfig:
    """With the number of processes that torchrun or `accelerate launch` started, if this is one of them.

    Raises:
        UserError: the config asks for another number.
    """
    started, asked = processes.world_size(), config.train.num_processes
    if started == 1 or started == asked:
        return config
    if asked > 1:
        raise UserError(
            f"train.num_processes: {asked}, but {started} processes were started; leave it out or at {started}", 2
        )
    return config.model_copy(update={"train": config.train.model_copy(update={"num_processes": started})})


def _steps(config: PreftConfig, rows: int) -> int:
    """As the Trainer counts: the last step of an epoch may see fewer rows."""
    train = config.train
    if train.task == "grpo":
        prompts = train.batch_size * train.gradient_accumulation_steps // train.grpo.num_generations
        return math.ceil(train.epochs * (rows // max(prompts, 1)) * train.grpo.num_iterations)
    batches = math.ceil(math.ceil(rows / train.batch_size) / train.num_processes)
    return math.ceil(train.epochs * math.ceil(batches / train.gradient_accumulation_steps))
