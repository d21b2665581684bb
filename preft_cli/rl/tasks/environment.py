"""Problems of a reasoning-gym environment: to train on, to measure on, and solved ones to show."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from preft_cli.config.schema import PreftConfig
from preft_cli.data.turn import Message
from preft_cli.errors import UserError
from preft_cli.rl.problem import Problem, Problems
from preft_cli.rl.tasks import gym

BARE = "Answer with the final answer alone, without any explanation."
ROUNDS = 8
"""Times that more problems are drawn to replace those that came twice."""

Entry = dict[str, Any]


def environment_problems(config: PreftConfig) -> Problems:
    """Problems of `train.grpo.environment`; none is held out that is trained on or shown, and none comes twice.

    Only those to train on hang on `project.seed`.

    Raises:
        UserError: no such environment, wrong settings, or too few different problems.
    """
    grpo, name = config.train.grpo, str(config.train.grpo.environment)
    seen: set[str] = set()
    shown = _draw(config, "examples", grpo.worked_examples, seen)
    held_out = _draw(config, "held-out", grpo.eval_problems, seen)
    train = _draw(config, "train", grpo.train_problems, seen)
    if not train or len(shown) < grpo.worked_examples:
        raise UserError(
            f"train.grpo.environment: {name} has only {len(seen)} different problems with these environment_args, too few for "
            f"worked_examples ({grpo.worked_examples}), eval_problems ({grpo.eval_problems}) and train_problems together"
        )
    turns = _turns(name, shown)
    return Problems(
        [_problem(entry, turns, f"{name}: problem {number}") for number, entry in enumerate(train, start=1)],
        [
            _problem(entry, turns, f"{name}: held-out problem {number}")
            for number, entry in enumerate(held_out, start=1)
        ],
        name,
        [
            f"{setting}: {name} has only {len(found)} different problems left, not {asked}; those are used"
            for setting, found, asked in (
                ("train.grpo.eval_problems", held_out, grpo.eval_problems),
                ("train.grpo.train_problems", train, grpo.train_problems),
            )
            if len(found) < asked
        ],
    )


def _draw(config: PreftConfig, purpose: str, count: int, seen: set[str]) -> list[Entry]:
    """Up to `count` entries whose question is not in `seen`, where it is then added."""
    found: list[Entry] = []
    for entry in _stream(config, purpose, count):
        question = str(entry["question"])
        if question not in seen:
            seen.add(question)
            found.append(entry)
        if len(found) == count:
            break
    return found


def _stream(config: PreftConfig, purpose: str, size: int) -> Iterator[Entry]:
    grpo = config.train.grpo
    # The problems to measure on, and those shown, are those of every seed: or accuracies of several seeds would not compare.
    seed = config.project.seed if purpose == "train" else 0
    # Far apart: entry i of an environment is drawn by its seed + i, so that neighbours would share their problems.
    seeds = Random(f"{seed} {purpose}")
    for _ in range(ROUNDS if size else 0):
        environment = gym.create(str(grpo.environment), grpo.environment_args, seeds.randrange(2**31), size)
        for index in range(size):
            with gym.quiet():
                try:
                    entry = environment[index]
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    raise UserError(f"train.grpo.environment: {grpo.environment} makes no problem: {reason}") from error
            yield entry


def _turns(name: str, shown: list[Entry]) -> tuple[Message, ...]:
    """The solved problems as earlier turns of the chat, the same for every problem."""
    if any(not isinstance(entry["answer"], str) for entry in shown):
        raise UserError(
            f"train.grpo.worked_examples: {name} judges answers but has none of its own to show; set worked_examples to 0",
            2,
        )
    return tuple(
        message
        for entry in shown
        for message in (Message("user", _asked(entry)), Message("assistant", entry["answer"]))
    )


def _problem(entry: Entry, turns: tuple[Message, ...], where: str) -> Problem:
    return Problem((*turns, Message("user", _asked(entry))), entry, where)


def _asked(entry: Entry) -> str:
    return f"{str(entry['question']).strip()}\n\n{BARE}"
