"""The custom ops around the kernels: LoRA on a linear layer or a gated MLP, and interventions. torch.compile sees no further.

Only a CUDA engine imports this module: it registers the ops in vLLM's library.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from engine_patch.kernels.layer import LAYERS
from engine_patch.kernels.triton_lora import expand, shrink
from engine_patch.kernels.triton_mlp import silu_and_mul, silu_and_mul_adapted


def _add_lora(y: torch.Tensor, x: torch.Tensor, layer: torch.Tensor) -> None:
    """`engine_patch.kernels.reference.add_lora_reference`, with the tokens' adapters in the step's blocks.

    Args:
        y: `[num_tokens, sum of widths]`, changed in place.
        x: `[num_tokens, in_features]`, of the pool's dtype.
        layer: `Layer.key`, int64 `[1]` on the host.
    """
    one = LAYERS[layer.item()]  # type: ignore[index]
    if one.shared.linear:
        assert x.stride(1) == y.stride(1) == 1
        expand(one, y, shrink(one, x, None))


def _add_intervention(hidden: torch.Tensor, residual: torch.Tensor, layer: torch.Tensor) -> None:
    """`engine_patch.kernels.reference.add_intervention_reference`; the rest is as for LoRA.

    Args:
        hidden: `[num_tokens, width]`, changed in place.
        residual: `[num_tokens, width]`, of the same dtype.
        layer: of a stream.
    """
    one = LAYERS[layer.item()]  # type: ignore[index]
    if one.shared.streams:
        assert residual.shape == hidden.shape
        assert residual.dtype == hidden.dtype
        assert residual.stride(1) == hidden.stride(1) == 1
        expand(one, hidden, shrink(one, hidden, residual))  # shrink has read hidden before expand writes it


def _add_lora_silu_and_mul(gate_up: torch.Tensor, x: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, `[num_tokens, width]`, of what `preft_add_lora` would leave in gate_up, which is not changed.

    Rows in no block of the step, which are a graph's padding, are left unset.

    Args:
        gate_up: `[num_tokens, 2 * width]`.
        x: `[num_tokens, in_features]`.
        layer: of two slices.
    """
    one, out = LAYERS[layer.item()], _fake_silu_and_mul(gate_up)  # type: ignore[index]
    assert x.stride(1) == gate_up.stride(1) == 1
    if one.shared.linear:
        silu_and_mul_adapted(one, out, gate_up, shrink(one, x, None))
    else:
        silu_and_mul(out, gate_up)
    return out


def _fake(*args: Any) -> None:
    """For tracing: these ops return nothing."""


def _fake_silu_and_mul(gate_up: torch.Tensor, *args: Any) -> torch.Tensor:
    return gate_up.new_empty((gate_up.size(0), gate_up.size(1) // 2))


direct_register_custom_op("preft_add_lora", _add_lora, ["y"], _fake)
direct_register_custom_op("preft_add_intervention", _add_intervention, ["hidden"], _fake)
direct_register_custom_op("preft_add_lora_silu_and_mul", _add_lora_silu_and_mul, [], _fake_silu_and_mul)
add_lora = torch.ops.vllm.preft_add_lora
add_intervention = torch.ops.vllm.preft_add_intervention
add_lora_silu_and_mul = torch.ops.vllm.preft_add_lora_silu_and_mul
