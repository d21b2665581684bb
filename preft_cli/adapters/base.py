"""What every reader of adapters is given and gives back."""

from __future__ import annotations

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

    def require_streams(self, what: object, exit_code: int = 1) -> None:
        """For an adapter with a DiReFT part.

        Raises:
            UserError: the model's residual streams are not known; says why, and what to do. `what` begins the message.
        """
        if self.streams:
            return
        reason = unknown(self.fingerprint.model_type)
        if self.declared:
            reason = (
                f"model.residual_stream is set, but which modules of {self.name} ({self.fingerprint.model_type}) are its "
                "decoder layers is not clear: that takes exactly one list named `layers` with as many as its config says. "
                "Use LoRA (method lorap or lora) instead"
            )
        raise UserError(f"{what} cannot act on {self.name}: {reason}", exit_code)


class Loaded(NamedTuple):
    """An adapter, and what a person should know about it."""

    adapter: Adapter
    warnings: list[str]
