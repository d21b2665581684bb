"""Problems from the data files of the config."""

from __future__ import annotations

from pathlib import Path

from preft_cli.config.schema import PreftConfig
from preft_cli.data.load import data_files
from preft_cli.data.read import read_as
from preft_cli.errors import UserError
from preft_cli.rl.problem import Problem, Problems
from preft_cli.rl.tasks.rows import PROBLEMS

KEYS = ("train.file", "eval.file")


def file_problems(config: PreftConfig, root: Path) -> Problems:
    """Problems of train.file to train on, and of eval.file to measure on; those that are in both are not trained on.

    Raises:
        UserError: a file cannot be read or lines of it are wrong.
    """
    files = data_files(config, root)
    read = {
        key: read_as(PROBLEMS, file.file, root, key, file.split)
        for key, file in files.items()
        if key in KEYS  # train.validation_file is for losses
    }
    held_out = read.get("eval.file", [])
    measured = {repr(problem.prompt) for problem in held_out}
    train = [problem for problem in read["train.file"] if repr(problem.prompt) not in measured]
    if not train:
        raise UserError("train.file: every problem of it is also in eval.file; hold out others")
    remarks = [*_unread(config), *_remarks(read["train.file"], train, held_out)]
    return Problems(train, held_out, config.train.file.name, remarks)


def _unread(config: PreftConfig) -> list[str]:
    """Settings of an environment where there is none."""
    grpo = config.train.grpo
    return [
        f"train.grpo.{key} is not used: train.grpo.environment is not set, and problems of train.file are taken as they are"
        for key in ("environment_args", "train_problems", "eval_problems", "worked_examples")
        if key in grpo.model_fields_set
        and getattr(grpo, key) != type(grpo).model_fields[key].get_default(call_default_factory=True)
    ]


def _remarks(read: list[Problem], train: list[Problem], held_out: list[Problem]) -> list[str]:
    remarks = []
    if not held_out:
        remarks.append("eval.file is not set: accuracy on held-out problems is not measured")
    if len(train) < len(read):
        remarks.append(f"train.file: {len(read) - len(train)} problems are also in eval.file and not trained on")
    plain = next((problem.where for problem in train if isinstance(problem.prompt, str)), None)
    if plain:
        remarks.append(
            f'{plain}: "prompt" is plain text and gets no chat template; for a chat write a list of messages'
        )
    return remarks
