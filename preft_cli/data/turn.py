"""One answer to learn: before and after tokenising."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    """One function that an assistant calls."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class Message(NamedTuple):
    """One message of a chat."""

    role: str
    content: str | tuple[str, ...]
    """Text; or the texts of its content parts, none of them for null."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Of a tool's message: the call that it answers."""
    name: str | None = None

    @property
    def text(self) -> str:
        """All of the content, put together as the server does for templates that know text only."""
        return self.content if isinstance(self.content, str) else "\n".join(filter(None, self.content))


@dataclass(frozen=True)
class Turn:
    """One assistant turn and everything before it. A conversation of k assistant turns becomes k of these."""

    prompt: tuple[Message, ...] | str
    """Messages: a request to the chat endpoint. Text: one to the completions endpoint."""
    completion: str | Message
    """What the assistant answered, without any end-of-turn token; a message if it calls tools, which templates write."""
    where: str
    """`file:line` or `file:row N`, for messages to the user."""
    tools: tuple[dict[str, Any], ...] = ()
    """Definitions of functions, as the record has them: the request's `tools`."""


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
