"""What the sections of `preft.yaml` are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Method = Literal["lorap", "direftp", "lorap+direftp", "lora", "direft", "lora+direft"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Arm = Literal["base", "lora", "lorap", "direftp", "direft"]

# No count of steps, tokens or adapters comes near the bound; libraries fail in strange ways beyond it.
PositiveInt = Annotated[int, Field(gt=0, le=2**31 - 1)]
Rank = Annotated[int, Field(gt=0, le=512)]
Layer = Annotated[int, Field(strict=True, ge=0, le=9999)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Milliseconds = Annotated[float, Field(gt=0)]
Length = PositiveInt | Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
"""Tokens: a number, or [low, high] to draw from evenly."""


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of: `PositiveInt | None` gives int and NoneType."""
    return {annotation} | {kind for part in get_args(annotation) for kind in _kinds(part)}


class Section(BaseModel):
    """Base of every section: no unknown keys, no silent changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes `learning_rate: true` for 1.0; a person never means that."""
        if isinstance(value, bool) and info.field_name in cls.model_fields:
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise PydanticCustomError("bool_for_number", "expected a number")
        return value
