"""`train.report_to`: TensorBoard, and Weights & Biases for those who ask for it, through Transformers' callbacks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from transformers import TrainerCallback

from preft_cli.config.schema import PreftConfig
from preft_cli.console import say
from preft_cli.errors import UserError
from preft_cli.training import processes
from preft_cli.training.output import RunFolder


def present_boards(config: PreftConfig) -> list[str]:
    """The boards that this run reports to. What was asked for is installed (`setting_problems`); the default may be not."""
    wanted = list(dict.fromkeys(config.train.report_to))
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        say("tensorboard is not installed (pip install 'preft[train]'): metrics.jsonl holds the same numbers")
    return [name for name in wanted if name not in missing]


def boards(names: list[str], config: PreftConfig, folder: RunFolder) -> list[TrainerCallback]:
    """The callbacks for `names`, of the process that reports.

    Raises:
        UserError: Weights & Biases does not start.
    """
    if not processes.is_main():
        return []
    callbacks: list[TrainerCallback] = []
    if "tensorboard" in names:
        from transformers.integrations import TensorBoardCallback

        board = TensorBoardCallback()
        board.logging_dir = str(folder.tensorboard)
        callbacks.append(board)
    if "wandb" in names:
        callbacks.append(_wandb(config, folder))
    return callbacks


def _wandb(config: PreftConfig, folder: RunFolder) -> Any:
    import wandb
    from transformers.integrations import WandbCallback

    try:
        # A run of ours, which the callback finds: with the config that people know, and its files in the run's folder.
        wandb.init(
            project=os.environ.get("WANDB_PROJECT", config.project.name),
            name=config.adapter.name,
            dir=str(folder.path),
            config=config.model_dump(mode="json"),
            reinit="finish_previous",
        )
        return WandbCallback()
    except Exception as error:  # no account, no network, …: its own classes of errors come from several modules
        reason = str(error).rstrip(".")
        raise UserError(
            f"train.report_to: Weights & Biases did not start: {reason}. `wandb login` first, set WANDB_MODE=offline, "
            "or leave wandb out"
        ) from error
