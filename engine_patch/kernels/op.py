"""The custom ops around the kernels: LoRA on a linear layer or a gated MLP, and interventions. torch.compile sees no further.

Only a CUDA engine imports this module: it registers the ops in vLLM's library.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.utils.torch_utils import direct_register_custom_op

from engine_patch.kernels.tiles import RANK_UNIT, choose_splits, choose_tiles, common_alignment, most_blocks
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
    if step[0][LINEAR]:
        work = _Work(x, Weights(pool, table, slices), step, max_adapters, max_rank)
        expand(y, work.shrink(x, None), work.weights, work.grid(ADAPTED), work.tiles, max_width, alignment)


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
    if not step[0][STREAMS]:
        return
    assert residual.shape == hidden.shape
    assert residual.dtype == hidden.dtype
    assert residual.stride(1) == 1
    assert slices.size(0) == 1
    work, width = _Work(hidden, Weights(pool, table, slices), step, max_adapters, max_rank), hidden.size(1)
    shrunk = work.shrink(hidden, residual)  # which has read hidden before expand writes it
    expand(hidden, shrunk, work.weights, work.grid(ADAPTED), work.tiles, width, common_alignment(width))


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
    if not step[0][LINEAR]:
        silu_and_mul(out, gate_up)
        return out
    work = _Work(x, Weights(pool, table, slices), step, max_adapters, max_rank)
    silu_and_mul_adapted(out, gate_up, work.shrink(x, None), work.weights, work.grid(ALL), work.tiles)
    return out


class _Work:
    """What the kernels of one call share."""

    def __init__(
        self, x: torch.Tensor, weights: Weights, step: list[torch.Tensor], max_adapters: int, max_rank: int
    ) -> None:
        assert x.dtype == weights.pool.dtype
        assert x.stride(1) == weights.table.stride(2) == 1
        assert weights.table.stride(1) == 4
        assert weights.slices.is_contiguous()
        self.weights = weights
        self._counts, self._blocks, self._tokens = step
        self._is_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.tiles = choose_tiles(x.size(0), max_rank, x.dtype == torch.float32, self._is_invariant)
        self._padded_rank = -(-max_rank // RANK_UNIT) * RANK_UNIT
        # A captured graph is replayed for other steps of its size.
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        self._most = most_blocks(x.size(0), max_adapters) if capturing else None

    def grid(self, which: int) -> Grid:
        """The adapted blocks, or all."""
        return Grid(self._blocks, self._tokens, int(self._counts[which]) if self._most is None else self._most)

    def shrink(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """`[splits, n_slices, num_tokens, padded_rank]`; only what expand reads has been written."""
        (num_tokens, in_features), n_slices = x.shape, self.weights.slices.size(0)
        splits = choose_splits(num_tokens, in_features, n_slices, self._is_invariant)
        shape = splits, n_slices, num_tokens, self._padded_rank
        shrunk = torch.empty(shape, dtype=torch.float32, device=x.device)
        shrink(shrunk, x, residual, self.weights, self.grid(ADAPTED), self.tiles)
        return shrunk


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
