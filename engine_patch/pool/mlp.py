"""Gated MLPs whose activation adds what adapters add to gate and up (see `kernels.triton_mlp`).

Upstream: `down(act(gate_up(x)))`, with LoRA in a kernel of its own behind gate_up. Needed: LoRA within the activation. Still
fits while the forward pass of these classes is just that (`contract.MLP_SYMBOLS`). Computed as Inductor compiles the base
model's; in eager mode vLLM rounds `silu(gate)` once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine_patch import contract

CLASSES = {(symbol.module, symbol.name.partition(".")[0]) for symbol in contract.MLP_SYMBOLS}
"""Module and name: Transformers has classes of the same names."""


class AdaptedMLP(nn.Module):
    """In place of vLLM's module, with its layers under their names."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = mlp.gate_up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden]` to the same shape."""
        layer = self.gate_up_proj
        gate_up, _ = layer.base_layer(x)
        hidden = layer.punica_wrapper.add_lora_silu_and_mul(gate_up, x, layer.lora_a_stacked)
        out, _ = self.down_proj(hidden)
        return out  # type: ignore[no-any-return]


def replace_mlps(model: nn.Module) -> int:
    """Put `AdaptedMLP` in place of every gated MLP of known classes that computes with plain weights; how many there were.

    Args:
        model: with vLLM's LoRA layers in place, and the pool attached to them.

    Raises:
        PreftError: one of these classes is not what was tested.
    """
    found = {name: module for name, module in model.named_modules() if _fits(module)}
    if found:
        contract.check(contract.MLP_SYMBOLS + contract.ACTIVATION_SYMBOLS)
    for name, mlp in found.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, AdaptedMLP(mlp))
    return len(found)


def _fits(module: nn.Module) -> bool:
    if (type(module).__module__, type(module).__name__) not in CLASSES:
        return False
    layers = [getattr(module, name) for name in ("gate_up_proj", "down_proj")]
    # A quantised layer may take its input from a fused activation of its own.
    plain = (type(layer.base_layer.quant_method).__name__ == "UnquantizedLinearMethod" for layer in layers)
    return all(hasattr(layer, "lora_a_stacked") and layer.lora_a_stacked for layer in layers) and all(plain)
