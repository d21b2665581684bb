"""Definitions and calls of tools in a record, in the form of the chat API.

    "tools": [{"type": "function", "function": {"name": "f", "description": "…", "parameters": {…}}}]
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]

What the server would refuse is refused here; what it repairs in silence (arguments that are not JSON become none) too,
since nobody means to teach that.
"""

from __future__ import annotations

from typing import Any

from preft_cli.data.found import FormatError, keys, kind, parse_json
from preft_cli.data.turn import ToolCall

DEFINITION = '{"type": "function", "function": {"name": "…", "parameters": {…}}}'
CALL = '{"type": "function", "function": {"name": "…", "arguments": …}}'


def read_tools(record: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The definitions of a record: a list, or JSON text of one, as tables hold it whose columns have one type each.

    Raises:
        FormatError: anything that the server would refuse.
    """
    found = record.get("tools")
    if isinstance(found, str) and found:
        found = _parsed(found, '"tools"')
    if found is None or found == "":
        return ()
    if not isinstance(found, list):
        raise FormatError(f'"tools": found {kind(found)}; expected a list of {DEFINITION}')
    for number, tool in enumerate(found, start=1):
        _check_tool(tool, f'"tools": tool {number}')
    return tuple(found)


def _check_tool(tool: Any, what: str) -> None:
    function = _function(tool, what, DEFINITION)
    for key, wanted, name in (
        ("description", str, "text"),
        ("parameters", dict, "an object (a JSON schema)"),
        ("strict", bool, "true or false"),
    ):
        if function.get(key) is not None and not isinstance(function[key], wanted):
            raise FormatError(f'{what}: "{key}" is {kind(function[key])}; expected {name}')


def read_calls(found: Any, what: str) -> tuple[ToolCall, ...]:
    """The calls of the assistant's message `what`.

    Raises:
        FormatError: anything that the server would refuse, or repair in silence.
    """
    if not isinstance(found, list):
        raise FormatError(f'{what}: "tool_calls" is {kind(found)}; expected a list of {CALL}')
    return tuple(_call(call, f"{what}: tool call {number}") for number, call in enumerate(found, start=1))


def _call(call: Any, what: str) -> ToolCall:
    function = _function(call, what, CALL)
    if call.get("id") is not None and not isinstance(call["id"], str):
        raise FormatError(f'{what}: "id" is {kind(call["id"])}; expected text')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f'{what}: "arguments"')
    if not isinstance(arguments, dict):
        raise FormatError(f'{what}: "arguments": found {kind(arguments)}; expected an object, or JSON text of one')
    return ToolCall(function["name"], arguments, call.get("id"))


def _function(found: Any, what: str, expected: str) -> dict[str, Any]:
    """The function of a definition or call, which has a name."""
    if not isinstance(found, dict):
        raise FormatError(f"{what}: found {kind(found)}; expected {expected}")
    function = found.get("function")
    if not isinstance(function, dict):
        raise FormatError(f"{what}: found {keys(found)}; expected {expected}")
    if found.get("type") not in (None, "function"):
        raise FormatError(f'{what}: found "type": {found["type"]!r}; expected "function"')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise FormatError(f"{what}: its function has no name; expected {expected}")
    return function


def _parsed(text: str, what: str) -> Any:
    try:
        return parse_json(text)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error
