"""Base models: from the name in the config to a local folder."""

from __future__ import annotations

from preft_cli.models.base import BaseModel
from preft_cli.models.modules import modules_of
from preft_cli.models.resolve import ALIASES, resolve
from preft_cli.models.shapes import RANDOM_SHAPES

__all__ = ["ALIASES", "RANDOM_SHAPES", "BaseModel", "modules_of", "resolve"]
