"""Names of cells: folders that tell what lies in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from preft_cli.config.problems import ConfigErrors, Problem

MAX_BYTES = 200
"""Of a folder's name: file systems take 255, and files are written aside under somewhat longer names."""

_UNFIT = re.compile(r"[^A-Za-z0-9._+-]+")


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """`adapter.rank` -> `rank`, unless two keys would have the same name."""
    wanted = list(keys)
    last = [key.rpartition(".")[2] for key in wanted]
    return {key: name if last.count(name) == 1 else key for key, name in zip(wanted, last, strict=True)}


def cell_name(settings: Mapping[str, Any]) -> str:
    """`rank=8,method=lorap+direftp,learning_rate=0.001`, from values by short name.

    Raises:
        ConfigErrors: it is too long for a folder.
    """
    name = ",".join(f"{key}={_fit(value)}" for key, value in settings.items())
    if len(name) > MAX_BYTES:
        raise ConfigErrors([Problem("--sweep", f"the folder's name would be too long: {name}; shorten the values")])
    return name


def value_text(value: Any) -> str:
    """A value as people read it: `0.001`, `q_proj+v_proj`, `null`."""
    if isinstance(value, list):
        return "+".join(map(value_text, value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)


def _fit(value: Any) -> str:
    return _UNFIT.sub("-", value_text(value))
