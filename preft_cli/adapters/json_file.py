"""JSON that people and other programs wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from preft_cli.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        UserError: missing, not UTF-8, not JSON (truncated), or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); it may be truncated: save the adapter again") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data
