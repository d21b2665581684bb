"""How the parts of the reward add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from preft_cli.errors import UserError
from preft_cli.rl.problem import Problem, Reward

MOST = 1e18
"""Of one answer: training computes in float32, up to 3.4e38, and with squares of rewards."""


@dataclass(frozen=True)
class Scores:
    """Of some answers, in their order."""

    total: list[float]
    """The weighted sum of the parts."""
    parts: dict[str, list[float | None]]
    """By the reward's name, before the weight; None: it does not apply to the problem."""
    solved: list[bool]
    """1 or more by the first reward that applies."""


def score(problems: Sequence[Problem], completions: Sequence[str], rewards: Sequence[tuple[Reward, float]]) -> Scores:
    """Judge `completions[i]`, an answer to `problems[i]`.

    Raises:
        UserError: no reward applies to a problem, one gives what is no finite number, or they add up to too large a one.
    """
    columns = [_column(problems, completions, reward) for reward, _ in rewards]
    total, solved = [], []
    for row, problem in enumerate(problems):
        values = [column[row] for column in columns]
        first = next((value for value in values if value is not None), None)
        if first is None:
            names = ", ".join(reward.name for reward, _ in rewards)
            raise UserError(
                f"{problem.where}: no reward applies to an answer to it: {names} returned None; add one that does, or leave "
                "the row out"
            )
        total.append(_sum(problem, completions[row], rewards, values))
        solved.append(first >= 1)
    return Scores(total, dict(zip(_names(rewards), columns, strict=True)), solved)


def _sum(
    problem: Problem, completion: str, rewards: Sequence[tuple[Reward, float]], values: Sequence[float | None]
) -> float:
    parts = [
        (reward.name, weight * value)
        for (reward, weight), value in zip(rewards, values, strict=True)
        if value is not None
    ]
    total = sum(part for _, part in parts)
    if not abs(total) <= MOST:
        name = max(parts, key=lambda part: abs(part[1]))[0]
        raise UserError(
            f"{problem.where}: the rewards, {name} above all, add up to {total:g} for {completion[-200:]!r}; training computes "
            f"with numbers up to {MOST:g}"
        )
    return total


def _column(problems: Sequence[Problem], completions: Sequence[str], reward: Reward) -> list[float | None]:
    values = reward(problems, completions)
    for problem, completion, value in zip(problems, completions, values, strict=True):
        if value is not None and not math.isfinite(value):
            raise UserError(f"{problem.where}: the reward {reward.name} gave {value} to {completion[-200:]!r}")
    return values


def _names(rewards: Sequence[tuple[Reward, float]]) -> list[str]:
    """Of the columns: several formats are format, format 2, ..."""
    names: list[str] = []
    for reward, _ in rewards:
        same = sum(name == reward.name or name.startswith(f"{reward.name} ") for name in names)
        names.append(f"{reward.name} {same + 1}" if same else reward.name)
    return names
