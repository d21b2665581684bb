"""One message of a record in `messages` form, as the chat API takes it."""

from __future__ import annotations

from typing import Any

from preft_cli.data.found import FormatError, keys, kind
from preft_cli.data.tools import read_calls
from preft_cli.data.turn import Message

ROLES = ("system", "user", "assistant", "tool")
ONLY = {"tool_calls": "assistant", "tool_call_id": "tool"}
"""Fields that messages of one role have."""
FIELDS = {"role", "content", "name", *ONLY}
EXPECTED = 'expected {"role": "…", "content": "…"}'
PART = 'expected {"type": "text", "text": "…"}'


def read_message(found: Any, number: int) -> Message:
    """The message, which may have no other content than text and calls of tools.

    Raises:
        FormatError: with its number in the conversation.
    """
    what = f"message {number}"
    if not isinstance(found, dict):
        raise FormatError(f"{what}: found {kind(found)}; {EXPECTED}")
    filled = {key: value for key, value in found.items() if value not in (None, [], {}, "")}
    if not {"role"} <= found.keys() or filled.keys() - FIELDS or not (found.keys() & {"content", "tool_calls"}):
        more = ' and nothing else but "name", "tool_calls" and "tool_call_id"'
        raise FormatError(f"{what}: found {keys(found)}; {EXPECTED}{more}")
    role = found["role"]
    if role not in ROLES:
        raise FormatError(f"{what}: found role {role!r}; expected one of {', '.join(ROLES)}")
    for key, only in ONLY.items():
        if key in filled and role != only:
            raise FormatError(f'{what}: found "{key}"; expected it in messages of role {only!r} only, found {role!r}')
    for key in ("name", "tool_call_id"):
        if key in filled and not isinstance(found[key], str):
            raise FormatError(f'{what}: "{key}" is {kind(found[key])}; expected text')
    calls = read_calls(filled["tool_calls"], what) if "tool_calls" in filled else ()
    content = _content(found.get("content"), what, may_be_null=bool(calls))
    return Message(role, content, calls, filled.get("tool_call_id"), filled.get("name"))


def _content(found: Any, what: str, *, may_be_null: bool) -> str | tuple[str, ...]:
    if isinstance(found, str):
        return found
    if found is None and may_be_null:
        return ()
    if not isinstance(found, list) or not found:
        raise FormatError(f'{what}: "content" is {kind(found)}; expected text')
    return tuple(_part(part, f"{what}: content part {number}") for number, part in enumerate(found, start=1))


def _part(part: Any, what: str) -> str:
    """A part of the content, which must be text."""
    if not isinstance(part, dict):
        raise FormatError(f"{what}: found {kind(part)}; {PART}")
    filled = {key for key, value in part.items() if value is not None}  # tables have null in columns of other kinds
    if part.get("type") != "text" or filled != {"type", "text"}:
        found = f'"type": {part["type"]!r}' if part.get("type", "text") != "text" else keys(part)
        raise FormatError(f"{what}: found {found}; {PART}: adapters are trained on text alone")
    if not isinstance(part["text"], str):
        raise FormatError(f'{what}: "text" is {kind(part["text"])}; expected text')
    return part["text"]
