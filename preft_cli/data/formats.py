"""The four forms of a training record, and what is wrong with one that fits none of them.

    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}        ShareGPT
    {"instruction": "x", "input": "", "output": "y"}                                          Alpaca
    {"prompt": "x", "completion": "y"}                                                        plain text, no chat

Chats may have `tools`, and messages of the first form `tool_calls`. Nothing that could change what is learnt is skipped in
silence: images and unknown roles are errors, and so is plain text, which has no prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preft_cli.data.found import FormatError, keys, kind
from preft_cli.data.messages import read_message
from preft_cli.data.tools import read_tools
from preft_cli.data.turn import Message, Turn

EXPECTED = '{"messages": …}, {"conversations": …}, {"instruction": …, "output": …} or {"prompt": …, "completion": …}'
NO_PROMPT = (
    "it has no prompt, hence no token that an adapter on prompt tokens could act on; split it into "
    '{"prompt": …, "completion": …}, or write conversations'
)
"""Of plain text."""
UNREAD = ("images", "image", "videos", "video", "audios", "audio", "chat_template_kwargs")
"""Fields of a record that other trainers take, which change what the model reads."""
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


def turns_of(record: Any, where: str) -> list[Turn]:
    """The assistant turns of one record, each with its prompt.

    Raises:
        FormatError: when the record fits none of the four forms, or there is nothing to learn from it.
    """
    if not isinstance(record, dict):
        raise FormatError(f"found {kind(record)}; expected one of {EXPECTED}")
    # Rows of a table have every column; those of other forms are null.
    present = [name for name in FORMATS if record.get(name) is not None] or [name for name in FORMATS if name in record]
    if not present and isinstance(record.get("text"), str):
        raise FormatError(f'found plain text ("text"): {NO_PROMPT}')
    if len(present) != 1:
        found = f"both {' and '.join(present)}" if present else keys(record)
        raise FormatError(f"found {found}; expected one of {EXPECTED}")
    for name in UNREAD:
        if record.get(name):
            raise FormatError(f'found "{name}": a row that was trained without it would not be the one you wrote')
    return FORMATS[present[0]](record, where)


def _messages(record: dict[str, Any], where: str) -> list[Turn]:
    messages = [read_message(m, n) for n, m in _numbered(record, "messages")]
    if record.get("system") and messages[0].role == "system":
        raise FormatError('found "system" beside a system message; keep one of them')
    return _split(record, [*_system(record), *messages], where)


def _sharegpt(record: dict[str, Any], where: str) -> list[Turn]:
    messages = [_sharegpt_message(m, n) for n, m in _numbered(record, "conversations")]
    return _split(record, [*_system(record), *messages], where)


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
    return _split(record, [*_system(record), Message("user", question), Message("assistant", output)], where)


def _plain(record: dict[str, Any], where: str) -> list[Turn]:
    if record.get("tools"):
        raise FormatError('found "tools" beside "prompt"; a text prompt takes none: write "messages"')
    if record.get("system"):
        raise FormatError('found "system" beside "prompt"; a text prompt has none: write "messages"')
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


def _split(record: dict[str, Any], messages: list[Message], where: str) -> list[Turn]:
    """One turn for each assistant message; what follows the last one has no answer and is not used."""
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not answers:
        raise FormatError("found no assistant message: there is nothing to learn")
    if answers[0] == 0:
        raise FormatError("the first message is the assistant's; expected a user or system message before it")
    if empty := [index + 1 for index in answers if not (messages[index].text or messages[index].tool_calls)]:
        raise FormatError(f"message {empty[0]}: the assistant's answer is empty: there is nothing to learn")
    tools = read_tools(record)
    return [Turn(tuple(messages[:index]), _answer(messages[index]), where, tools) for index in answers]


def _answer(message: Message) -> str | Message:
    return message if message.tool_calls else message.text


def _numbered(record: dict[str, Any], key: str) -> list[tuple[int, Any]]:
    if not isinstance(record[key], list) or not record[key]:
        raise FormatError(f'"{key}": found {kind(record[key])}; expected a list of at least two messages')
    return list(enumerate(record[key], start=1))


def _fields(found: Any, names: tuple[str, str], what: str) -> tuple[str, str]:
    """The two texts of one message, which may have no other content."""
    expected = f'expected {{"{names[0]}": "…", "{names[1]}": "…"}}'
    if not isinstance(found, dict):
        raise FormatError(f"{what}: found {kind(found)}; {expected}")
    filled = {key for key, value in found.items() if value not in (None, [], {}, "")} | (found.keys() & set(names))
    if filled != set(names):
        raise FormatError(f"{what}: found {keys(found)}; {expected} and nothing else")
    for key in names:
        if not isinstance(found[key], str):
            raise FormatError(f'{what}: "{key}" is {kind(found[key])}; expected text')
    return found[names[0]], found[names[1]]


def _text(record: dict[str, Any], key: str) -> str:
    if key not in record:
        raise FormatError(f'found {keys(record)} but no "{key}"; expected one of {EXPECTED}')
    if not isinstance(record[key], str):
        raise FormatError(f'"{key}": found {kind(record[key])}; expected text')
    return str(record[key])
