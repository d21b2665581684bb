"""The custom ops around the kernels: LoRA on a linear layer or a gated MLP, and interventions. torch.compile sees no further.

Only a CUDA engine imports this module: it registers the ops in vLLM's library.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from vllm import envs
from vllm.utils.torch_utils import direct_register_custom_op

from engine_patch.kernels.tiles import Tiles, common_alignment, most_blocks, plan
from engine_patch.kernels.triton_lora import Grid, Weights, expand, shrink
from engine_patch.kernels.triton_mlp import silu_and_mul, silu_and_mul_adapted

ADAPTED, ALL, LINEAR, STREAMS = range(4)
"""What a step's counts are, in order: adapted blocks, all blocks, and whether any adapter has a part for these."""


def _add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    step: list[torch.Tensor],
    max_adapters: int,
    max_rank: int,
    max_width: int,
    alignment: int = 1,
) -> None:
    """`engine_patch.kernels.reference.add_lora_reference`, with the tokens' adapters in the step's blocks.

    Args:
        y: `[num_tokens, sum of widths]`, changed in place.
        x: `[num_tokens, in_features]`.
        pool: `[num_elements]`, of the dtype of x.
        table: int64 `[kinds, n_slices, 4]`, a view with strides.
        slices: int32 `[n_slices, 2]`.
        step: counts, int32 `[4]` on the host (see `ADAPTED`); `Grid.blocks` and `Grid.tokens`, on the device.
        max_adapters: no step has more adapters.
        max_rank: no rank in `table` is larger.
        max_width: no width in `slices` is larger.
        alignment: a power of two that divides all starts and widths in `slices`.
    """
    counts = step[0].tolist()
    if counts[LINEAR]:
        weights = Weights(pool, table, slices)
        shrunk, tiles, adapted, _ = _shrink(x, None, weights, step, counts, max_adapters, max_rank)
        expand(y, shrunk, weights, adapted, tiles, max_width, alignment)


def _add_intervention(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    step: list[torch.Tensor],
    max_adapters: int,
    max_rank: int,
) -> None:
    """`engine_patch.kernels.reference.add_intervention_reference`; the rest is as for LoRA.

    Args:
        hidden: `[num_tokens, width]`, changed in place.
        residual: `[num_tokens, width]`, of the same dtype.
        slices: `[[0, width]]`.
    """
    counts = step[0].tolist()
    if not counts[STREAMS]:
        return
    assert residual.shape == hidden.shape
    assert residual.dtype == hidden.dtype
    assert residual.stride(1) == 1
    assert slices.size(0) == 1
    weights, width = Weights(pool, table, slices), hidden.size(1)
    # Shrink has read hidden before expand writes it.
    shrunk, tiles, adapted, _ = _shrink(hidden, residual, weights, step, counts, max_adapters, max_rank)
    expand(hidden, shrunk, weights, adapted, tiles, width, common_alignment(width))


def _add_lora_silu_and_mul(
    gate_up: torch.Tensor,
    x: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    step: list[torch.Tensor],
    max_adapters: int,
    max_rank: int,
) -> torch.Tensor:
    """`silu(gate) * up`, `[num_tokens, width]`, of what `preft_add_lora` would leave in gate_up, which is not changed.

    Rows in no block of the step, which are a graph's padding, are left unset.

    Args:
        gate_up: `[num_tokens, 2 * width]`.
        x: `[num_tokens, in_features]`.
        slices: `[[0, width], [width, width]]`; the rest is as for LoRA.
    """
    num_tokens, width = gate_up.size(0), gate_up.size(1) // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    assert gate_up.stride(1) == 1
    if num_tokens == 0:
        return out
    counts = step[0].tolist()
    if not counts[LINEAR]:
        silu_and_mul(out, gate_up)
        return out
    weights = Weights(pool, table, slices)
    shrunk, tiles, _, every = _shrink(x, None, weights, step, counts, max_adapters, max_rank)
    silu_and_mul_adapted(out, gate_up, shrunk, weights, every, tiles)
    return out


def _shrink(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weights: Weights,
    step: list[torch.Tensor],
    counts: list[int],
    max_adapters: int,
    max_rank: int,
) -> tuple[torch.Tensor, Tiles, Grid, Grid]:
    """The first kernel: what it computed, and for the second one the tiles, the adapted blocks, and all blocks."""
    assert x.dtype == weights.pool.dtype
    assert x.stride(1) == weights.table.stride(2) == 1
    assert weights.table.stride(1) == 4
    (num_tokens, in_features), n_slices = x.shape, weights.slices.size(0)
    _, blocks, tokens = step
    num_adapted, num_blocks = counts[ADAPTED], counts[ALL]
    if x.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph is replayed for other steps of its size
        num_adapted = num_blocks = most_blocks(num_tokens, max_adapters, max_rank, is_invariant())
    adapted = Grid(blocks, tokens, num_adapted)
    planned = plan(num_tokens, in_features, n_slices, max_rank, x.dtype == torch.float32, is_invariant())
    # Not zeroed: shrink writes every element that the second kernel reads.
    shape = planned.splits, n_slices, num_tokens, planned.padded_rank
    shrunk = torch.empty(shape, dtype=torch.float32, device=x.device)
    shrink(shrunk, x, residual, weights, adapted, planned.tiles)
    return shrunk, planned.tiles, adapted, Grid(blocks, tokens, num_blocks)


@cache
def is_invariant() -> bool:
    """vLLM's batch invariance, which is set before an engine starts."""
    return bool(envs.VLLM_BATCH_INVARIANT)


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
