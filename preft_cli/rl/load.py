"""The problems of a config, checked before any model is loaded."""

from __future__ import annotations

from pathlib import Path

from preft_cli.config.schema import PreftConfig
from preft_cli.data.read import raise_all
from preft_cli.rl.problem import Problem, Problems
from preft_cli.rl.rewards.needs import lacks, reward_names
from preft_cli.rl.tasks.environment import environment_problems
from preft_cli.rl.tasks.files import file_problems


def load_problems(config: PreftConfig, root: Path) -> Problems:
    """Problems to train on and held-out ones: of `train.grpo.environment`, else of train.file and eval.file.

    Args:
        root: where relative paths start.

    Raises:
        UserError: they cannot be had, or rows lack what the rewards judge answers by: each with its file and line.
    """
    problems = environment_problems(config) if config.train.grpo.environment else file_problems(config, root)
    names = reward_names(config)
    raise_all([text for problem in (*problems.train, *problems.held_out) if (text := _lack(problem, names))])
    return problems


def _lack(problem: Problem, names: list[str]) -> str | None:
    found = lacks(problem.record, names)
    return f"{problem.where}: {found}" if found else None
