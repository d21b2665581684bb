"""The reward `environment`: what the environment of reasoning-gym itself gives an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field

from preft_cli.config.grpo_section import GrpoConfig
from preft_cli.config.section import Section
from preft_cli.rl.problem import Problem
from preft_cli.rl.rewards.judge import Judge
from preft_cli.rl.text import tagged


class EnvironmentArgs(Section):
    """Its settings; those of the environment itself are train.grpo.environment_args."""

    partial: bool = Field(True, description="What the environment gives an answer that is right in part, instead of 0.")


class EnvironmentReward:
    """0 to 1 for what stands in <answer>…</answer>, or for all of the text.

    Most environments pay in part for text that holds the right answer. A policy may learn to live on that: "12" holds 1 and 2.
    """

    name = "environment"

    def __init__(self, args: EnvironmentArgs, grpo: GrpoConfig) -> None:
        settings = {"name": grpo.environment, "args": grpo.environment_args}
        self._judge = Judge("preft_cli.rl.rewards.environment:judge", settings)
        self._partial = args.partial

    def __call__(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float | None]:
        """See `Reward`."""
        jobs = [(tagged(text), problem.record) for problem, text in zip(problems, completions, strict=True)]
        scores = self._judge.scores(jobs)
        return [score if self._partial or score is None or score >= 1 else 0.0 for score in scores]


def judge(name: str, args: dict[str, Any]) -> Callable[[tuple[str, dict[str, Any]]], float]:
    """In the judging process: what scores an answer to an entry."""
    from preft_cli.rl.tasks.gym import create

    environment = create(name, args, seed=0, size=1)
    return lambda job: float(environment.score_answer(*job))
