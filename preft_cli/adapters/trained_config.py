"""`preft_config.json` of a trained adapter's folder. No torch here: plans read it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from engine_patch.rule import parts
from preft_cli.adapters.layout import TRAINED_CONFIG
from preft_cli.config.schema import Method
from preft_cli.errors import UserError
from preft_cli.methods import PARTS
from preft_cli.methods.base import PartSettings

SCHEMA_VERSION = 2
_LORA_OF_VERSION_1 = ("rank", "alpha", "use_rslora", "target_modules")


class TrainedConfig(BaseModel):
    """What the tensors beside it are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    preft_version: str
    created: str
    """UTC, ISO 8601."""
    name: str
    method: Method
    parts: dict[str, SerializeAsAny[PartSettings]]
    """By the names of `rule.parts`: each part that the method has, and no other."""
    base_model: str | None
    """The base model's name as the project's config had it; `base` is what is compared."""
    base: dict[str, Any]
    chat_template_digest: str | None
    digest: str
    """Content digest of the adapter: tells a damaged or exchanged tensor file."""
    meta: dict[str, Any]
    """Whatever else the training recorded."""

    @field_validator("parts", mode="before")
    @classmethod
    def _read_parts(cls, value: Any) -> Any:
        """Each part knows its own settings."""
        if not isinstance(value, dict):
            return value
        read, wrong = dict(value), []
        for name in value.keys() & PARTS.keys():
            try:
                read[name] = PARTS[name].settings_type.model_validate(value[name])
            except ValidationError as error:
                wrong.append(_details(error, name))
        if wrong:
            raise PydanticCustomError("part", "{why}", {"why": "; ".join(sorted(wrong))})
        return read

    @model_validator(mode="after")
    def _parts_of_the_method(self) -> TrainedConfig:
        if self.parts.keys() != parts(self.method):
            has, wants = (" and ".join(sorted(names)) or "none" for names in (self.parts, parts(self.method)))
            raise PydanticCustomError("parts", f"a {self.method} adapter has the parts {wants}, this one has {has}")
        return self


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
        return TrainedConfig.model_validate(_from_version_1(data) if version == 1 else data)
    except ValidationError as error:
        raise UserError(f"{path} is not a trained adapter's config: {_details(error)}") from error


def _from_version_1(data: dict[str, Any]) -> dict[str, Any]:
    """Then LoRA was the only part, and its settings lay among the others."""
    lora = {key: data[key] for key in _LORA_OF_VERSION_1 if key in data}
    kept = {key: value for key, value in data.items() if key not in _LORA_OF_VERSION_1}
    return {**kept, "schema_version": SCHEMA_VERSION, "parts": {"lora": lora}}


def _details(error: ValidationError, *prefix: str) -> str:
    """All that is wrong, each with its place."""
    lines = ((".".join(map(str, (*prefix, *one["loc"]))), one["msg"]) for one in error.errors())
    return "; ".join(": ".join(filter(None, line)) for line in lines)
