"""`preft_config.json` of a trained adapter's folder. No torch here: plans read it too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from preft_cli.adapters.layout import TRAINED_CONFIG
from preft_cli.errors import UserError

SCHEMA_VERSION = 1


class TrainedConfig(BaseModel):
    """What the tensors beside it are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    preft_version: str
    created: str
    """UTC, ISO 8601."""
    name: str
    method: Literal["lorap", "lora"]
    rank: int = Field(gt=0)
    alpha: float
    use_rslora: bool
    target_modules: str | list[str]
    base_model: str | None
    """The base model's name as the project's config had it; `base` is what is compared."""
    base: dict[str, Any]
    chat_template_digest: str | None
    digest: str
    """Content digest of the adapter: tells a damaged or exchanged tensor file."""
    meta: dict[str, Any]
    """Whatever else the training recorded."""

    @property
    def scaling(self) -> float:
        """The factor of `B @ A`."""
        return self.alpha / math.sqrt(self.rank) if self.use_rslora else self.alpha / self.rank


def read_trained_config(folder: Path) -> TrainedConfig:
    """Read and check `preft_config.json`.

    Raises:
        UserError: missing, truncated, of a newer version, or with wrong values (all of them at once).
    """
    from preft_cli.adapters.json_file import read_json

    path = folder / TRAINED_CONFIG
    if not path.is_file():
        raise UserError(f"{folder}: {TRAINED_CONFIG} is missing; train again, or copy the whole folder")
    data = read_json(path)
    version = data.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(
            f"{path} was written by a newer preft: version {version}, this one reads {SCHEMA_VERSION}; update preft"
        )
    try:
        return TrainedConfig.model_validate(data)
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"{path} is not a trained adapter's config: {details}") from error
