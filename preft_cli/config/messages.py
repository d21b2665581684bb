"""Pydantic's errors in the words of people who write YAML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from preft_cli.config.near import model_at, near_keys, near_words


def explain(root: type[BaseModel], path: tuple[str | int, ...], error: ErrorDetails) -> str:
    """What is wrong with the value at `path`, without its position and name."""
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "extra_forbidden":
        return _unknown_key(root, tuple(str(part) for part in path))
    if kind == "literal_error":
        return _not_one_of(context["expected"], value)
    if kind in ("model_type", "model_attributes_type"):
        section = model_at(root, tuple(str(part) for part in path))
        keys = ", ".join(section.model_fields) if section else "its keys"
        return f"expected keys below it ({keys}), found {shown(value)}"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} is not allowed{_described(root, path)}"
    if kind in _WORDS:
        return _WORDS[kind](context, shown(value)) + _default_hint(root, path, value)
    return f"{_lower(error['msg'])}, found {shown(value)}"


def shown(value: Any) -> str:
    """A value as it is named in an error: short, and with YAML's words."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_Phrase = Callable[[dict[str, Any], str], str]
_WHOLE: _Phrase = lambda _, found: f"expected a whole number, found {found}"  # noqa: E731 - a table of phrases
_NUMBER: _Phrase = lambda _, found: f"expected a number, found {found}"  # noqa: E731
_SWITCH: _Phrase = lambda _, found: f"expected true or false, found {found}"  # noqa: E731
_TEXT: _Phrase = lambda _, found: f"expected text, found {found}; put it in quotes if it is meant as text"  # noqa: E731
_WORDS: dict[str, _Phrase] = {
    "missing": lambda _, __: "required, and not set",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": lambda _, found: f"expected a finite number, found {found}",
    "bool_for_number": lambda _, found: f"expected a number, found {found}",
    "bool_type": _SWITCH,
    "bool_parsing": _SWITCH,
    "string_type": _TEXT,
    "path_type": lambda _, found: f"expected a path, found {found}",
    "list_type": lambda _, found: f"expected a list such as [a, b], found {found}",
    "dict_type": lambda _, found: f"expected a mapping such as {{key: value}}, found {found}",
    "greater_than": lambda context, found: f"must be more than {_bound(context['gt'])}, found {found}",
    "greater_than_equal": lambda context, found: f"must be {_bound(context['ge'])} or more, found {found}",
    "less_than": lambda context, found: f"must be less than {_bound(context['lt'])}, found {found}",
    "less_than_equal": lambda context, found: f"must be {_bound(context['le'])} or less, found {found}",
    "too_short": lambda context, _: f"needs {context['min_length']} or more entries",
    "string_too_short": lambda context, _: f"needs {context['min_length']} or more characters",
    "value_error": lambda context, _: str(context.get("error", "not a valid value")),
}


def _unknown_key(root: type[BaseModel], path: tuple[str, ...]) -> str:
    if near := near_keys(root, path):
        return f"unknown key (did you mean {' or '.join(near)}?)"
    section = model_at(root, path[:-1])
    known = f"; known here: {', '.join(section.model_fields)}" if section else ""
    vllm = "; an option of vLLM goes under serve.vllm_args" if path[0] == "serve" else ""
    return f"unknown key{vllm or known}"


def _not_one_of(expected: str, value: Any) -> str:
    words = [word.strip().strip("'") for word in expected.replace(" or ", ", ").split(",")]
    near = near_words(value, words)
    meant = f" (did you mean {near}?)" if near else ""
    return f"expected {' or '.join(words)}, found {shown(value)}{meant}"


def _described(root: type[BaseModel], path: tuple[str | int, ...]) -> str:
    section = model_at(root, tuple(str(part) for part in path[:-1]))
    field = section.model_fields.get(str(path[-1])) if section else None
    return f". {field.description}" if field and field.description else ""


def _default_hint(root: type[BaseModel], path: tuple[str | int, ...], value: Any) -> str:
    """`rank:` with nothing behind it is an error (an empty section is not): say how to get the default."""
    section = model_at(root, tuple(str(part) for part in path[:-1]))
    field = section.model_fields.get(str(path[-1])) if section else None
    if value is not None or field is None or field.is_required():
        return ""
    return f"; leave the line out for the default, {field.get_default(call_default_factory=True)}"


def _bound(number: float) -> str:
    """With all digits where it is whole: `4294967295`, not `4.29497e+09`."""
    return f"{number:.0f}" if float(number).is_integer() else f"{number:g}"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
