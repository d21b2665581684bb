"""Everything about an RL run that can be wrong before a model is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from preft_cli.config.schema import PreftConfig
from preft_cli.console import progress, say, warn
from preft_cli.data.load import Tokens
from preft_cli.data.tokenise import prompt_token_ids
from preft_cli.errors import UserError
from preft_cli.rl.load import load_problems
from preft_cli.rl.problem import Problem, Reward
from preft_cli.rl.rewards.load import load_rewards
from preft_cli.rl.rewards.verifiers import check_verifiers
from preft_cli.training.foundation import Foundation, check_machine, lay_foundation

UNREAD = ("log_every", "padding_side")
"""Keys of `train`."""


@dataclass(frozen=True)
class Asked:
    """Problems with their prompts in token ids."""

    problems: list[Problem]
    prompts: list[list[int]]
    """By problem, exactly the ids that a server computes for the same messages."""
    dropped: int
    """Problems whose prompt leaves no room for an answer."""
    digest: str
    """Equal if and only if answers to them can be compared: prompts, right answers, rewards, and how long answers may be."""


@dataclass(frozen=True)
class PreparedRl(Foundation):
    """A run that has passed all checks."""

    train: Asked
    held_out: Asked | None
    rewards: list[tuple[Reward, float]]
    title: str
    """What the problems are, for people."""
    rollout_store: Path | None
    """`train.grpo.rollout_store`; relative paths start at the config's folder."""


def prepare_rl(config: PreftConfig, root: Path) -> PreparedRl:
    """Make or read the problems, find the rewards, and check every setting against the base model.

    Raises:
        UserError: anything that would fail later.
    """
    check_machine(config)
    rewards = load_rewards(config, root)
    problems = load_problems(config, root)
    doubts = check_verifiers(problems.train, rewards)
    foundation, tokens = lay_foundation(config, root)
    train = ask(problems.train, tokens, config, "train")
    held_out = ask(problems.held_out, tokens, config, "held-out") if problems.held_out else None
    for remark in problems.remarks:
        say(remark)
    for doubt in doubts:
        warn(doubt)
    if unread := [f"train.{key}" for key in UNREAD if key in config.train.model_fields_set]:
        say(f"{', '.join(unread)}: nothing that train.task: grpo does reads this")
    groups = config.train.batch_size * config.train.gradient_accumulation_steps // config.train.grpo.num_generations
    if len(train.problems) < groups:
        raise UserError(
            f"there are {len(train.problems)} problems to train on, and a step takes {groups}; lower train.batch_size"
        )
    store = config.train.grpo.rollout_store
    return PreparedRl(
        **vars(foundation),
        train=train,
        held_out=held_out,
        rewards=rewards,
        title=problems.name,
        rollout_store=root / store if store else None,
    )


def ask(problems: Sequence[Problem], tokens: Tokens, config: PreftConfig, split: str) -> Asked:
    """The problems whose prompts leave room for an answer.

    Raises:
        UserError: none does, or the chat template refuses one.
    """
    room = tokens.limit - config.train.grpo.max_completion_length
    kept: list[Problem] = []
    prompts: list[list[int]] = []
    longest = 0
    with progress(f"tokenising {split} problems", total=len(problems), unit="problems") as bar:
        for problem in problems:
            bar.advance()
            ids = prompt_token_ids(problem.prompt, tokens.tokenizer, tokens.template, problem.where)
            longest = max(longest, len(ids))
            if 0 < len(ids) <= room:
                kept.append(problem)
                prompts.append(ids)
    limits = f"train.max_length = {tokens.limit} less train.grpo.max_completion_length"
    if not kept:
        raise UserError(
            f"{split} problems: none is left: the longest prompt has {longest} tokens, and {limits} is {room}"
        )
    if dropped := len(problems) - len(kept):
        say(
            f"{split} problems: {dropped} of {len(problems)} were dropped, their prompts are longer than {room} tokens ({limits})"
        )
    return Asked(kept, prompts, dropped, _digest(kept, prompts, config))


def _digest(problems: Sequence[Problem], prompts: Sequence[Sequence[int]], config: PreftConfig) -> str:
    grpo = config.train.grpo
    records = [[list(ids), problem.record] for problem, ids in zip(problems, prompts, strict=True)]
    rewards = [one.model_dump() for one in grpo.rewards or ()]
    judged = [records, rewards, grpo.max_completion_length]
    return hashlib.sha256(json.dumps(judged, sort_keys=True, default=str).encode()).hexdigest()
