"""What is wrong with a record, in words: what was found there, and what is expected."""

from __future__ import annotations

import json
from typing import Any


class FormatError(ValueError):
    """What is wrong with one record: what was found, what is expected."""


def keys(record: dict[str, Any]) -> str:
    """`the keys "role", "value"`, for a message to the user."""
    if not record:
        return "an empty object"
    shown = ", ".join(f'"{key}"' for key in list(record)[:8])
    return f"the key{'s' if len(record) > 1 else ''} {shown}" + (", …" if len(record) > 8 else "")


def kind(value: Any) -> str:
    """The JSON kind of `value`, for a message to the user."""
    if value is None:
        return "null"
    if value == []:
        return "an empty list"
    names = {bool: "true or false", str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def parse_json(text: str) -> Any:
    """One JSON document, and nothing that another reader would read otherwise.

    Raises:
        FormatError: not JSON, a key that occurs twice (readers keep one of them in silence), a number that is none, or half
            of a surrogate pair, which is no text.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError as error:
        raise FormatError("nested too deeply") from error
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(f"not JSON: {error}") from error
    if "\\ud" in text.lower():
        _check_surrogates(value)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise FormatError(f'found the key "{next(key for key in names if names.count(key) > 1)}" twice in one object')
    return found


def _no_number(name: str) -> None:
    raise FormatError(f"not JSON: {name} is no number")


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise FormatError(f"found {half}, half of a surrogate pair, which is no character") from error
