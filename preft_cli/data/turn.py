"""One answer to learn: before and after tokenising."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Turn:
    """One assistant turn and everything before it. A conversation of k assistant turns becomes k of these."""

    prompt: tuple[Message, ...] | str
    """Messages: a request to the chat endpoint. Text: one to the completions endpoint."""
    completion: str
    """What the assistant answered, without any end-of-turn token."""
    where: str
    """`file:line`, for messages to the user."""


@dataclass(frozen=True)
class Row:
    """One `Turn` in token ids."""

    prompt_ids: list[int]
    """Exactly the ids that the server computes for the same request, generation prompt and BOS included."""
    completion_ids: list[int]
    """The completion tokenised on its own, then the one id that ends the turn."""
    where: str = ""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)
