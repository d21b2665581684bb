"""Messages and tools as the server's chat template sees them, and as a request carries them.

vLLM changes both on the way from a request to the template. Templates may print any of it as JSON, so the order of keys
counts too. `tests/unit/test_data_server_parity.py` compares all of this with vLLM itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from preft_cli.data.turn import Message, ToolCall

BILLING_HEADER = "x-anthropic-billing-header"
"""vLLM leaves a first line that begins like this out of system messages, since it changes with every request."""


def template_messages(messages: Iterable[Message], *, parts: bool) -> list[dict[str, Any]]:
    """What the server gives to the template; `parts`: content as a list, for templates that loop over it."""
    return [_template_message(message, parts) for message in messages]


def _template_message(message: Message, parts: bool) -> dict[str, Any]:
    texts = (message.content,) if isinstance(message.content, str) else message.content
    if message.role == "system":
        texts = tuple(text for found in texts if (text := _without_header(found)) is not None)
    content: Any = [{"type": "text", "text": text} for text in texts] if parts else "\n".join(filter(None, texts))
    if parts and message.role == "tool":
        content = "\n".join(texts)  # of tools, most such templates know text only
    shown: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        shown["tool_calls"] = [_call(call, call.arguments) for call in message.tool_calls]
    for key in ("tool_call_id", "name"):
        if getattr(message, key) is not None:
            shown[key] = getattr(message, key)
    return shown


def _without_header(text: str) -> str | None:
    """None where nothing is left."""
    return text if not text.startswith(BILLING_HEADER) else text.partition("\n")[2] or None


def _call(call: ToolCall, arguments: Any) -> dict[str, Any]:
    shown = {"function": {"arguments": arguments, "name": call.name}, "type": "function"}
    return shown if call.id is None else {"id": call.id, **shown}


def template_tools(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The definitions as vLLM writes them out again: its fields, in its order, with null for what is missing."""
    return [{"type": "function", "function": _definition(tool["function"])} for tool in tools] or None


def _definition(function: dict[str, Any]) -> dict[str, Any]:
    known = {key: function.get(key) for key in ("name", "description", "parameters")}
    return known if function.get("strict") is None else {**known, "strict": function["strict"]}


def request(messages: Iterable[Message], tools: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The body of a request to the chat endpoint that asks for the answer to `messages`."""
    body: dict[str, Any] = {"messages": [_request_message(message) for message in messages]}
    if defined := list(tools):
        # The template sees the definitions with any choice; the default one needs a parser for this model's calls.
        body |= {"tools": defined, "tool_choice": "none"}
    return body


def _request_message(message: Message) -> dict[str, Any]:
    shown = {key: value for key, value in message._asdict().items() if value is not None and key != "tool_calls"}
    if not isinstance(message.content, str):
        shown["content"] = [{"type": "text", "text": text} for text in message.content] or None
    if message.tool_calls:
        # The API insists on an id, which a record may lack.
        shown["tool_calls"] = [
            {"id": f"call_{number}", **_call(call, json.dumps(call.arguments, ensure_ascii=False))}
            for number, call in enumerate(message.tool_calls)
        ]
    return shown
