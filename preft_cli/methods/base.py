"""What a part of a method brings along. No torch here: plans and readers of configs come by.

A method is made of parts (`engine_patch.rule.parts`): `lorap` of LoRA alone, `lorap+direftp` of LoRA and DiReFT. Whether it acts
on the prompt or everywhere is the same code with or without the prompt mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import Tensor

    from engine_patch.adapter import LowRankPair
    from preft_cli.adapters.base import BaseFacts
    from preft_cli.config.schema import AdapterConfig
    from preft_cli.methods.mask import PromptMask


class PartSettings(BaseModel):
    """What `preft_config.json` tells about one part of an adapter, beside its tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(gt=0)

    @property
    def scaling(self) -> float:
        """The scaling of each of its pairs."""
        return 1.0


class Attached(ABC):
    """A part on a base model: in memory, trainable, float32."""

    model: Any
    """What is trained from now on: the model that was given, or a wrapper around it."""

    @abstractmethod
    def mask(self, mask: PromptMask) -> None:
        """Let it act only where `mask` says."""

    @abstractmethod
    def disabled(self) -> AbstractContextManager[Any]:
        """Inside of this block the model computes without the part."""

    @abstractmethod
    def pairs(self) -> dict[str, LowRankPair]:
        """The trained weights by module name, as they are: the next step changes them."""


class Part(ABC):
    """One kind of low-rank update: where it acts, how it is trained, how its tensors are called."""

    name: ClassVar[str]
    """As `engine_patch.rule.parts` says it."""
    title: ClassVar[str]
    """For people."""
    settings_type: ClassVar[type[PartSettings]]
    own_keys: ClassVar[frozenset[str]]
    """Keys of the config's `adapter` section that no other part reads."""

    @abstractmethod
    def targets(self, config: AdapterConfig, base: BaseFacts) -> list[str]:
        """Full names of the modules to adapt, in the model's order.

        Raises:
            UserError: settings that do not fit the base model.
        """

    @abstractmethod
    def settings(self, config: AdapterConfig, targets: Sequence[str]) -> PartSettings:
        """What the trained adapter's config will say."""

    @abstractmethod
    def attach(self, model: Any, config: AdapterConfig, targets: Sequence[str]) -> Attached:
        """Put it on a frozen model, perhaps one with other parts on it; it starts as a no-op."""

    @abstractmethod
    def holds(self, module: str) -> bool:
        """Whether a pair of that name is of this part."""

    @abstractmethod
    def owns(self, tensor: str) -> bool:
        """Whether a tensor of that name is of this part."""

    @abstractmethod
    def to_tensors(self, pairs: Mapping[str, LowRankPair]) -> dict[str, Tensor]:
        """Its pairs as they are saved: contiguous, in their own dtype."""

    @abstractmethod
    def to_pairs(self, tensors: Mapping[str, Tensor], settings: Any, where: Path) -> dict[str, LowRankPair]:
        """The inverse of `to_tensors`, with every tensor checked; `settings` are of `settings_type`.

        Raises:
            UserError: missing tensors, wrong shapes, values that are not finite. `where` names the file.
        """

    @abstractmethod
    def check_complete(self, pairs: Mapping[str, LowRankPair], settings: Any, base: BaseFacts, where: Path) -> None:
        """Refuse pairs (of this part) that are not all and only those which `settings` name in that base model.

        Raises:
            UserError: with the number and an example.
        """


def plain(model: Any) -> Any:
    """The base model inside of a wrapper, under whose own names its modules go."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
