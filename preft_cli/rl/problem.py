"""One problem: what is asked, and all that a reward may need to judge an answer. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from preft_cli.data.turn import Message

Prompt = tuple[Message, ...] | str
"""A chat, or plain text."""


@dataclass(frozen=True)
class Problem:
    """What one group of answers is sampled for."""

    prompt: Prompt
    record: dict[str, Any]
    """The data row as it is, or the environment's entry: `answer`, `tests`, ..."""
    where: str
    """Of the row, for messages: `train.jsonl:12`."""

    @property
    def answer(self) -> str | None:
        """The right answer as text, where there is one."""
        found = self.record.get("answer")
        return None if found is None else str(found)


@dataclass(frozen=True)
class Problems:
    """Problems to train on and, apart from them, to measure accuracy on."""

    train: list[Problem]
    held_out: list[Problem]
    name: str = ""
    """For titles: the environment or the file."""
    remarks: list[str] = field(default_factory=list)
    """What the user must know about them."""


class Reward(Protocol):
    """Judges answers."""

    name: str
    """Short, for logs."""

    def __call__(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float | None]:
        """One number for each answer (text without special tokens); None: this reward does not apply to the problem."""
