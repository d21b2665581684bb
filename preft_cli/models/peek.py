"""What a base model's config says, if it is on this machine already: for plans, which fetch nothing and load no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from preft_cli.models.resolve import ALIASES, RANDOM_PREFIX
from preft_cli.models.shapes import RANDOM_SHAPES

_UNPACKED = {"dtype": "bfloat16"}
"""The built-in model's type is known before it is unpacked."""


def peek_config(name: str, root: Path) -> dict[str, Any] | None:
    """The `config.json` of the base model called `name`; None if it is not here, or cannot be read."""
    if name in ALIASES:
        return _UNPACKED
    if name.startswith(RANDOM_PREFIX):
        return RANDOM_SHAPES.get(name.removeprefix(RANDOM_PREFIX))
    folder = root / Path(name).expanduser()
    return read_config(folder) if folder.is_dir() else _in_hub_cache(name)


def read_config(folder: Path) -> dict[str, Any] | None:
    """The `config.json` in `folder`; None if there is none that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _in_hub_cache(name: str) -> dict[str, Any] | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # the core install lacks the package; a name that is no Hub id
        return None
    return read_config(Path(found).parent) if isinstance(found, str) else None
