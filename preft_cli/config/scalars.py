"""Plain YAML scalars by the 1.2 core schema.

PyYAML reads YAML 1.1: `no` and `on` become booleans, `017` an octal number, and `2e-5` stays text. A config file has
no use for such surprises, so the patterns here are those of YAML 1.2 (section 10.3.2).
"""

from __future__ import annotations

import re

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
# Beyond about 308 digits there is no float of that size, and beyond 4300 Python does not write an integer out.
_MOST_DIGITS = 300

Scalar = None | bool | int | float | str


def plain(text: str) -> Scalar:
    """The value of an unquoted scalar: `2e-5` is a float, `0o17` is 15, `017` is 17, `no` is text."""
    for pattern, tag in ((_NULL, "null"), (_BOOL, "bool"), (_INT, "int"), (_FLOAT, "float")):
        if pattern.fullmatch(text):
            return tagged(_TAG + tag, text)
    return text


def tagged(tag: str, text: str) -> Scalar:
    """The value of a scalar with an explicit tag such as `!!str`; ValueError says why there is none."""
    kind = tag.removeprefix(_TAG)
    if kind == "str":
        return text
    if kind == "null" and _NULL.fullmatch(text):
        return None
    if kind == "bool" and _BOOL.fullmatch(text):
        return text.lower() == "true"
    if kind == "int" and _INT.fullmatch(text):
        if len(text) > _MOST_DIGITS:
            raise ValueError(f"a whole number of {len(text)} digits; no setting takes one so large")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if kind == "float" and _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if tag.startswith(_TAG) and kind in ("null", "bool", "int", "float"):
        raise ValueError(f"{text!r} is not a YAML {kind}")
    raise ValueError(f"the tag {tag.replace(_TAG, '!!')} has no meaning in a config file")
