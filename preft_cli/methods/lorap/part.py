"""LoRA as a part of a method. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_patch.residual import is_stream
from preft_cli.adapters.names import parse
from preft_cli.adapters.targets import targeted
from preft_cli.methods.base import Attached, Part, PartSettings
from preft_cli.methods.lorap.targets import target_modules

if TYPE_CHECKING:
    from torch import Tensor

    from engine_patch.adapter import LowRankPair
    from preft_cli.adapters.base import BaseFacts
    from preft_cli.config.schema import AdapterConfig


class LoraSettings(PartSettings):
    """Rank, scaling and modules, in PEFT's terms."""

    alpha: float
    use_rslora: bool
    target_modules: str | list[str]

    @property
    def scaling(self) -> float:
        """The factor of `B @ A`."""
        return self.alpha / math.sqrt(self.rank) if self.use_rslora else self.alpha / self.rank

    def peft(self) -> dict[str, Any]:
        """The PEFT config that the way back needs."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            # PEFT's own configs have whole numbers here, and some readers expect them.
            "lora_alpha": int(self.alpha) if self.alpha.is_integer() else self.alpha,
            "use_rslora": self.use_rslora,
            "target_modules": self.target_modules,
        }


class LoraPart(Part):
    """`y_i = W x_i + m_i (alpha/r) B A x_i`, by PEFT, under PEFT's tensor names."""

    name = "lora"
    title = "LoRA"
    settings_type = LoraSettings
    own_keys = frozenset({"alpha", "use_rslora", "target_modules"})

    def targets(self, config: AdapterConfig, base: BaseFacts) -> list[str]:
        return target_modules(config, base.shapes)

    def settings(self, config: AdapterConfig, targets: Sequence[str]) -> LoraSettings:
        modules = config.target_modules
        return LoraSettings(
            rank=config.rank,
            alpha=config.alpha,
            use_rslora=config.use_rslora,
            target_modules=modules if isinstance(modules, str) else sorted(modules),
        )

    def attach(self, model: Any, config: AdapterConfig, targets: Sequence[str]) -> Attached:
        from preft_cli.methods.lorap.layers import LoraLayers

        return LoraLayers(model, config, targets)

    def holds(self, module: str) -> bool:
        return not is_stream(module)

    def owns(self, tensor: str) -> bool:
        return parse(tensor) is not None

    def to_tensors(self, pairs: Mapping[str, LowRankPair]) -> dict[str, Tensor]:
        from preft_cli.adapters.pairs import to_tensors

        return to_tensors(pairs)

    def to_pairs(self, tensors: Mapping[str, Tensor], settings: Any, where: Path) -> dict[str, LowRankPair]:
        from preft_cli.adapters.pairs import to_pairs

        return to_pairs(tensors, lambda module: (settings.rank, settings.scaling), where)

    def check_complete(self, pairs: Mapping[str, LowRankPair], settings: Any, base: BaseFacts, where: Path) -> None:
        from preft_cli.adapters.pairs import check_complete

        check_complete(pairs, targeted({"target_modules": settings.target_modules}, base.shapes), where)
