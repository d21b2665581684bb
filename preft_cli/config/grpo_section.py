"""The section `train.grpo`, which `train.task: grpo` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from preft_cli.config.section import Fraction, PositiveInt, Section


class RewardConfig(Section):
    """One part of the reward."""

    reward: str = Field(
        description="math, code, format, environment (what train.grpo.environment scores), or package.module:function."
    )
    weight: float = Field(1.0, description="The reward is the weighted sum of its parts.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="Settings of this reward, such as {pattern: '<answer>.*</answer>'} of format."
    )


class GrpoConfig(Section):
    """Group relative policy optimization with verifiable rewards (arXiv 2402.03300)."""

    environment: str | None = Field(
        None,
        description="A task of reasoning-gym, such as gcd, whose problems take the place of train.file and eval.file.",
    )
    environment_args: dict[str, Any] = Field(
        default_factory=dict, description="Settings of that task, by its own names, such as {max_words: 3}."
    )
    train_problems: PositiveInt = Field(1000, description="Problems of the environment to train on.")
    eval_problems: PositiveInt = Field(200, description="Other problems of it, to measure accuracy on.")
    worked_examples: int = Field(2, ge=0, le=100, description="Solved problems of it at the beginning of each prompt.")
    rewards: list[RewardConfig] | None = Field(
        None,
        description="What answers are rewarded for, such as [math, {reward: format, weight: 0.2}]; default: environment, "
        "or math. The first one decides what counts as solved: 1 or more.",
    )
    num_generations: PositiveInt = Field(8, description="Answers to each prompt, compared with each other; 2 or more.")
    max_completion_length: PositiveInt = Field(
        256, description="Tokens of an answer; train.max_length counts prompt and answer."
    )
    temperature: float = Field(1.0, ge=0.01, le=2, description="Of sampling, and of the trained distribution.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample among the most likely tokens of this total probability.")
    top_k: int = Field(0, ge=0, description="Sample among that many most likely tokens; 0: all.")
    min_p: Fraction = Field(
        0.0, description="Sample among tokens at least that likely, relative to the most likely one."
    )
    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = Field(
        "dapo", description="How TRL averages the loss over tokens."
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group",
        description="What advantages are divided by: the spread of rewards in the group, in the batch, or nothing.",
    )
    beta: float = Field(0.0, ge=0, description="Weight of the KL divergence from the base model.")
    epsilon: float = Field(0.2, gt=0, lt=1, description="Probability ratios are clipped to 1 - epsilon ..")
    epsilon_high: float | None = Field(None, gt=0, description=".. 1 + epsilon_high; default: epsilon.")
    num_iterations: PositiveInt = Field(1, description="Optimizer steps on each set of answers.")
    importance_sampling: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        "token_truncate", description="How TRL corrects for what engine and trainer compute differently."
    )
    rollout_url: str | None = Field(
        None,
        description="A running preft serve that samples the answers, on other GPUs; default: an engine in this process.",
    )
    rollout_store: Path | None = Field(
        None,
        description="With rollout_url: the adapters folder of that server as this machine sees it; /dev/shm is memory.",
    )
    in_flight: Literal["finish", "abort"] = Field(
        "finish",
        description="Requests that run on the former weights while new ones arrive: let them end on those, or end them.",
    )

    @field_validator("rewards", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """`[math]` is short for `[{reward: math}]`."""
        if isinstance(value, list):
            return [{"reward": one} if isinstance(one, str) else one for one in value]
        return value
