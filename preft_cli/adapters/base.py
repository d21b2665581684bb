"""What every reader of adapters is given and gives back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine_patch.base_model import BaseFingerprint
from engine_patch.residual import unknown
from preft_cli.errors import UserError

if TYPE_CHECKING:
    from engine_patch.adapter import Adapter
    from preft_cli.models import BaseModel


class BaseFacts(NamedTuple):
    """What an adapter is checked against."""

    name: str
    fingerprint: BaseFingerprint
    shapes: dict[str, tuple[int, int]]
    """(in_features, out_features) by module name: the decoder's linear layers."""
    streams: dict[str, tuple[int, int]]
    """The same of its residual streams; empty if they are not known."""
    declared: bool = False
    """Whether the config says that they are what they seem, whatever the architecture (`model.residual_stream`)."""

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Everything that an adapter can act on."""
        return self.shapes | self.streams

    @classmethod
    def of(cls, base: BaseModel, declared: bool = False) -> BaseFacts:
        """From a resolved base model; reads its config and samples of its weights.

        `declared` is the config's `model.residual_stream`.
        """
        from preft_cli.models.modules import modules_of

        return cls(base.name, base.fingerprint, *modules_of(base, declared), declared)

    def require_streams(self, where: Path) -> None:
        """For an adapter with a DiReFT part.

        Raises:
            UserError: the model's residual streams are not known; `where` names the adapter.
        """
        if not self.streams:
            raise UserError(f"{where} cannot be served with {self.name}: {unknown(self.fingerprint.model_type)}")


class Loaded(NamedTuple):
    """An adapter, and what a person should know about it."""

    adapter: Adapter
    warnings: list[str]
