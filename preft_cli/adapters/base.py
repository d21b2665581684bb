"""What every reader of adapters is given and gives back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine_patch.base_model import BaseFingerprint

if TYPE_CHECKING:
    from engine_patch.adapter import Adapter
    from preft_cli.models import BaseModel


class BaseFacts(NamedTuple):
    """What an adapter is checked against."""

    name: str
    fingerprint: BaseFingerprint
    shapes: dict[str, tuple[int, int]]
    """(in_features, out_features) by module name: the decoder's linear layers."""

    @classmethod
    def of(cls, base: BaseModel) -> BaseFacts:
        """From a resolved base model; reads its config and samples of its weights."""
        from preft_cli.models import linear_modules

        return cls(base.name, base.fingerprint, linear_modules(base))


class Loaded(NamedTuple):
    """An adapter, and what a person should know about it."""

    adapter: Adapter
    warnings: list[str]
