"""What `preft train` would do, known without torch or a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from preft_cli.config.schema import PreftConfig
from preft_cli.data.load import data_files
from preft_cli.data.read import is_hub_id
from preft_cli.errors import UserError
from preft_cli.training.output import RunFolder


class TrainPlan(BaseModel):
    """The resolved run."""

    model_config = ConfigDict(frozen=True)

    base_model: str
    adapter: dict[str, Any]
    train: dict[str, Any]
    seed: int
    train_file: Path = Field(description="Or a data set of the Hub, owner/name.")
    eval_file: Path | None
    output_dir: Path
    output_dir_in_use: bool = Field(description="Then --resume or --overwrite is needed.")
    rows: int | None = Field(description="Assistant turns in train_file, before long ones are dropped.")
    held_out_rows: int | None
    rows_per_step: int | None = Field(
        description="Batch size x accumulation; with packing not known before tokenising."
    )
    steps: int | None = Field(
        description="Optimizer steps if no row is dropped; with packing only known if max_steps is set."
    )
    problems: list[str] = Field(description="What would stop the run at once.")


def plan_train(config: PreftConfig, root: Path) -> TrainPlan:
    """The plan for `config`, whose relative paths start at `root`. Reads the data files, writes nothing."""
    train, problems = config.train, [problem] if (problem := name_problem(config)) else []
    counts: dict[str, int] = {}
    for setting, file in data_files(config, root).items():
        try:
            counts[setting] = len(file.read())
        except UserError as error:
            problems.append(str(error))
    rows = counts.get("train.file")
    output = root / config.output_dir
    return TrainPlan(
        base_model=config.model.base,
        adapter=config.adapter.model_dump(mode="json"),
        train=train.model_dump(mode="json"),
        seed=config.project.seed,
        train_file=train.file if is_hub_id(train.file, root) else root / train.file,
        eval_file=root / config.eval.file if config.eval.file else None,
        output_dir=output,
        output_dir_in_use=RunFolder(output).in_use(),
        rows=rows,
        held_out_rows=counts.get("eval.file"),
        rows_per_step=None if train.packing else train.batch_size * train.gradient_accumulation_steps,
        steps=train.max_steps or (_steps(config, rows) if rows and not train.packing else None),
        problems=problems,
    )


def name_problem(config: PreftConfig) -> str | None:
    """Why the adapter may not have its name, if so: no server could tell it from the base model."""
    if config.adapter.name != config.model.base:
        return None
    return f"adapter.name: {config.adapter.name!r} is the base model's own name (model.base); choose another one"


def _steps(config: PreftConfig, rows: int) -> int:
    """As the Trainer counts: the last step of an epoch may see fewer rows."""
    train = config.train
    per_epoch = math.ceil(math.ceil(rows / train.batch_size) / train.gradient_accumulation_steps)
    return math.ceil(train.epochs * per_epoch)
