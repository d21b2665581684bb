"""The text behind `--sweep`: `KEY=VALUE,VALUE`, or `KEY:KEY=VALUE:VALUE,VALUE:VALUE` for keys that move together."""

from __future__ import annotations

from typing import Any

from preft_cli.config.overrides import parse_set
from preft_cli.config.problems import ConfigErrors, Problem

Value = bool | int | float | str | None
"""A single value of a swept key."""

_BRACKETS = {"[": 1, "]": -1}


def split_sweep(text: str, example: str) -> tuple[list[str], str]:
    """The keys, and the text of their values; `example` is shown to whoever wrote something else.

    Raises:
        ConfigErrors: it is no `key=values`, or names a key twice.
    """
    names, equals, values = text.partition("=")
    keys = [name.strip() for name in names.split(":")]
    if not equals or not all(keys):
        raise ConfigErrors([Problem(f"--sweep {text}", f"expected key=value,value, such as {example}")])
    if len(set(keys)) < len(keys):
        raise ConfigErrors([Problem(f"--sweep {text}", "a key is named twice")])
    return keys, values


def parse_values(text: str, num_keys: int, origin: str, *, lists: bool = False) -> dict[str, list[Any]]:
    """What each point gives the keys, by its text: `64`, or `64:320` for two keys. `lists`: a value may be one.

    Raises:
        ConfigErrors: a value is missing or no YAML.
    """
    points: dict[str, list[Any]] = {}
    for part in _split(text, ","):
        texts = _split(part, ":") if num_keys > 1 else [part]
        try:
            values = [parse_set(f"value={one}").value for one in texts]
        except ConfigErrors:
            values = []
        refused = dict if lists else list | dict
        if (
            not all(one.strip() for one in texts)
            or len(values) != num_keys
            or any(isinstance(value, refused) for value in values)
        ):
            example = (
                "1,8,64" if num_keys == 1 else ",".join([":".join(["64"] * num_keys), ":".join(["320"] * num_keys)])
            )
            raise ConfigErrors([Problem(origin, f"expected single values with commas between them, such as {example}")])
        name = part.strip() if num_keys == 1 else part.replace(" ", "")
        if name in points:
            raise ConfigErrors([Problem(origin, f"the value {name} is named twice")])
        points[name] = values
    return points


def _split(text: str, separator: str) -> list[str]:
    """Like `text.split(separator)`, without cutting a `[list, of, values]` into pieces."""
    parts, depth = [""], 0
    for character in text:
        depth += _BRACKETS.get(character, 0)
        if character == separator and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
