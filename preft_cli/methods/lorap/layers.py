"""PEFT's LoRA on a model, and the prompt mask within it.

    y_i = W x_i + m_i (alpha/r) B A x_i        m_i = 1 if position i < number of prompt tokens, else 0

PEFT computes the update as `lora_B(lora_A(dropout(x)))`, and neither has a bias, so zeroing what comes out of `lora_A` is the
whole of it. There a position has r numbers; zeroing x in front of it would copy all of its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from engine_patch.adapter import LowRankPair
from preft_cli.config.schema import AdapterConfig
from preft_cli.methods.base import Attached
from preft_cli.methods.mask import PromptMask

_ADAPTER = "default"
"""PEFT's name for the only adapter of a model."""


class LoraLayers(Attached):
    """The PEFT model: frozen but for a float32 adapter that starts as a no-op (B = 0)."""

    def __init__(self, model: Any, config: AdapterConfig, targets: Sequence[str]) -> None:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type, unused-ignore]
            lora_dropout=config.dropout,
            use_rslora=config.use_rslora,
            target_modules=list(targets),
            bias="none",
            task_type="CAUSAL_LM",
        )
        self.model = get_peft_model(model, lora, autocast_adapter_dtype=True)
        # Looked for once: a walk over all modules takes longer than the sync of weights that asks for them after each step.
        self._layers = _layers_of(self.model)
        for layer in self._layers.values():
            _leave_to_autocast(layer)

    def mask(self, mask: PromptMask) -> None:
        """Put the mask behind every `lora_A`.

        Raises:
            ValueError: when there is none that it could stand behind; the adapter would act on all tokens in silence.
        """

        def hide(module: nn.Module, args: tuple[Any, ...], shrunk_BTR: Tensor) -> Tensor:
            return mask.hide(shrunk_BTR)

        layers = [layer.lora_A[_ADAPTER] for layer in self._layers.values()]
        if not layers or not all(isinstance(layer, nn.Linear) for layer in layers):
            raise ValueError("the model has no lora_A linear layer to put the prompt mask behind")
        for layer in layers:
            layer.register_forward_hook(hide)

    def disabled(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.model.disable_adapter()
        return context

    def pairs(self) -> dict[str, LowRankPair]:
        return {
            name: LowRankPair(
                a=layer.lora_A[_ADAPTER].weight.detach(),
                b=layer.lora_B[_ADAPTER].weight.detach(),
                scaling=float(layer.scaling[_ADAPTER]),
            )
            for name, layer in self._layers.items()
        }


def _layers_of(model: Any) -> dict[str, Any]:
    """PEFT's layers by the plain names of what they wrap."""
    return {
        name: layer
        for name, layer in model.get_base_model().named_modules()
        if hasattr(layer, "lora_A") and _ADAPTER in layer.lora_A
    }


def _leave_to_autocast(layer: Any) -> None:
    """PEFT makes a float32 copy of each layer's input, of which autocast makes a bfloat16 copy that is kept for backward.

    Both have the values of the input itself. Without them the gradients are the same to the last bit, and a sixth less is
    kept for backward (of a Llama whose linear layers all have LoRA).
    """
    cast = layer._cast_input_dtype

    def cast_unless_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return x
        found: Tensor = cast(x, dtype)
        return found

    layer._cast_input_dtype = cast_unless_autocast
