"""The four forms of a training record, and what is wrong with one that fits none of them.

    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}        ShareGPT
    {"instruction": "x", "input": "", "output": "y"}                                          Alpaca
    {"prompt": "x", "completion": "y"}                                                        plain text, no chat

Nothing that could change what is learnt is skipped in silence: tool calls, images and unknown roles are errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preft_cli.data.turn import Message, Turn

EXPECTED = '{"messages": …}, {"conversations": …}, {"instruction": …, "output": …} or {"prompt": …, "completion": …}'
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


class FormatError(ValueError):
    """What is wrong with one record: what was found, what is expected."""


def turns_of(record: Any, where: str) -> list[Turn]:
    """The assistant turns of one record, each with its prompt.

    Raises:
        FormatError: when the record fits none of the four forms, or there is nothing to learn from it.
    """
    if not isinstance(record, dict):
        raise FormatError(f"found {_kind(record)}; expected one of {EXPECTED}")
    present = [name for name in FORMATS if name in record]
    if len(present) != 1:
        found = f"both {' and '.join(present)}" if present else _keys(record)
        raise FormatError(f"found {found}; expected one of {EXPECTED}")
    if record.get("tools"):
        raise FormatError('found "tools"; tool definitions cannot be trained on: remove them')
    return FORMATS[present[0]](record, where)


def _messages(record: dict[str, Any], where: str) -> list[Turn]:
    return _split([_message(m, n) for n, m in _numbered(record, "messages")], where)


def _message(found: Any, number: int) -> Message:
    role, content = _fields(found, ("role", "content"), f"message {number}")
    if role not in ROLES:
        raise FormatError(f"message {number}: found role {role!r}; expected one of {', '.join(ROLES)}")
    return Message(role, content)


def _sharegpt(record: dict[str, Any], where: str) -> list[Turn]:
    messages = [_sharegpt_message(m, n) for n, m in _numbered(record, "conversations")]
    return _split([*_system(record), *messages], where)


def _system(record: dict[str, Any]) -> list[Message]:
    return [Message("system", _text(record, "system"))] if record.get("system") else []


def _sharegpt_message(found: Any, number: int) -> Message:
    speaker, value = _fields(found, ("from", "value"), f"turn {number}")
    if speaker not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise FormatError(f'turn {number}: found "from": {speaker!r}; expected one of {known}')
    return Message(SHAREGPT_ROLES[speaker], value)


def _alpaca(record: dict[str, Any], where: str) -> list[Turn]:
    if record.get("history"):
        raise FormatError('found "history" beside "instruction"; write conversations of several turns as "messages"')
    instruction, output = _text(record, "instruction"), _text(record, "output")
    extra = _text(record, "input") if record.get("input") else ""
    question = f"{instruction}\n\n{extra}" if extra else instruction
    return _split([*_system(record), Message("user", question), Message("assistant", output)], where)


def _plain(record: dict[str, Any], where: str) -> list[Turn]:
    prompt, completion = _text(record, "prompt"), _text(record, "completion")
    if not completion:
        raise FormatError('"completion" is empty: there is nothing to learn')
    return [Turn(prompt, completion, where)]


FORMATS: dict[str, Callable[[dict[str, Any], str], list[Turn]]] = {
    "messages": _messages,
    "conversations": _sharegpt,
    "instruction": _alpaca,
    "prompt": _plain,
}
"""The key that tells a form apart, and its reader."""


def _split(messages: list[Message], where: str) -> list[Turn]:
    """One turn for each assistant message; what follows the last one has no answer and is not used."""
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not answers:
        raise FormatError("found no assistant message: there is nothing to learn")
    if answers[0] == 0:
        raise FormatError("the first message is the assistant's; expected a user or system message before it")
    if empty := [index + 1 for index in answers if not messages[index].content]:
        raise FormatError(f"message {empty[0]}: the assistant's answer is empty: there is nothing to learn")
    return [Turn(tuple(messages[:index]), messages[index].content, where) for index in answers]


def _numbered(record: dict[str, Any], key: str) -> list[tuple[int, Any]]:
    if not isinstance(record[key], list) or not record[key]:
        raise FormatError(f'"{key}": found {_kind(record[key])}; expected a list of at least two messages')
    return list(enumerate(record[key], start=1))


def _fields(found: Any, keys: tuple[str, str], what: str) -> tuple[str, str]:
    """The two texts of one message, which may have no other content."""
    expected = f'expected {{"{keys[0]}": "…", "{keys[1]}": "…"}}'
    if not isinstance(found, dict):
        raise FormatError(f"{what}: found {_kind(found)}; {expected}")
    filled = {key for key, value in found.items() if value not in (None, [], {}, "")} | (found.keys() & set(keys))
    if filled != set(keys):
        raise FormatError(f"{what}: found {_keys(found)}; {expected} and nothing else")
    for key in keys:
        if not isinstance(found[key], str):
            raise FormatError(f'{what}: "{key}" is {_kind(found[key])}; expected text')
    return found[keys[0]], found[keys[1]]


def _text(record: dict[str, Any], key: str) -> str:
    if key not in record:
        raise FormatError(f'found {_keys(record)} but no "{key}"; expected one of {EXPECTED}')
    if not isinstance(record[key], str):
        raise FormatError(f'"{key}": found {_kind(record[key])}; expected text')
    return str(record[key])


def _keys(record: dict[str, Any]) -> str:
    if not record:
        return "an empty object"
    shown = ", ".join(f'"{key}"' for key in list(record)[:8])
    return f"the key{'s' if len(record) > 1 else ''} {shown}" + (", …" if len(record) > 8 else "")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if value == []:
        return "an empty list"
    names = {bool: "true or false", str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
