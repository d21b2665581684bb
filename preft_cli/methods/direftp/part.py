"""DiReFT as a part of a method. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from engine_patch.residual import is_stream
from preft_cli.methods.base import Attached, Part, PartSettings
from preft_cli.methods.direftp.targets import direft_rank, layer_of, streams

if TYPE_CHECKING:
    from torch import Tensor

    from engine_patch.adapter import LowRankPair
    from preft_cli.adapters.base import BaseFacts
    from preft_cli.config.schema import AdapterConfig


class DireftSettings(PartSettings):
    """Rank, layers, and how W2 was trained."""

    layers: list[int] = Field(min_length=1)
    """It acts on the residual stream after these decoder layers; numbers from 0 on."""
    orthogonal: bool


class DireftPart(Part):
    """`h_i <- h_i + m_i W2^T (W1 h_i + b)`, by our own module behind each decoder block."""

    name = "direft"
    title = "DiReFT"
    settings_type = DireftSettings
    own_keys = frozenset({"layers", "direft_rank", "orthogonal"})

    def targets(self, config: AdapterConfig, base: BaseFacts) -> list[str]:
        return streams(config, base)

    def settings(self, config: AdapterConfig, targets: Sequence[str]) -> DireftSettings:
        layers = sorted(layer_of(name) for name in targets)
        return DireftSettings(rank=direft_rank(config), layers=layers, orthogonal=config.orthogonal)

    def attach(self, model: Any, config: AdapterConfig, targets: Sequence[str]) -> Attached:
        from preft_cli.methods.direftp.blocks import Interventions

        return Interventions(model, config, targets)

    def holds(self, module: str) -> bool:
        return is_stream(module)

    def owns(self, tensor: str) -> bool:
        return is_stream(tensor.rpartition(".")[0])

    def to_tensors(self, pairs: Mapping[str, LowRankPair]) -> dict[str, Tensor]:
        from preft_cli.methods.direftp.tensors import to_tensors

        return to_tensors(pairs)

    def to_pairs(self, tensors: Mapping[str, Tensor], settings: Any, where: Path) -> dict[str, LowRankPair]:
        from preft_cli.methods.direftp.tensors import to_pairs

        return to_pairs(tensors, settings.rank, where)

    def check_complete(self, pairs: Mapping[str, LowRankPair], settings: Any, base: BaseFacts, where: Path) -> None:
        from preft_cli.methods.direftp.tensors import check_complete

        check_complete(pairs, settings.layers, base, where)
