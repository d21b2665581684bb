"""Sizes of memory and files in a config: `512MB`, `1.5GiB`, or a number of bytes."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

UNITS = (
    {"B": 1}
    | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
    | {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
)

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


def parse_size(value: Any) -> Any:
    """The number of bytes that `value` says.

    Raises:
        PydanticCustomError: it says none.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    units = {name.lower(): factor for name, factor in UNITS.items()} | {"": 1}
    if not match or match[2].lower() not in units:
        raise PydanticCustomError("size", "expected a size such as 512MB or 1.5GiB, or a number of bytes")
    return int(float(match[1]) * units[match[2].lower()])


Size = Annotated[
    int,
    BeforeValidator(parse_size, json_schema_input_type=int | str),
    Field(gt=0, le=2**50),
]
"""Bytes."""
