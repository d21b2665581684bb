"""The custom ops around both kernels, `preft_add_lora` and `preft_add_intervention`. torch.compile does not look inside.

Only a CUDA engine imports this module: it registers the ops in vLLM's library.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.utils.torch_utils import direct_register_custom_op

from engine_patch.kernels.tiles import RANK_UNIT, choose_tiles, common_alignment
from engine_patch.kernels.triton_lora import Groups, expand, shrink


def _add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    metadata: list[torch.Tensor],
    max_rank: int,
    max_width: int,
    alignment: int = 1,
) -> None:
    """`engine_patch.kernels.reference.add_lora_reference`, with the tokens' slots in vLLM's metadata.

    Args:
        y: `[num_tokens, sum of widths]`, changed in place.
        x: `[num_tokens, in_features]`.
        pool: `[num_elements]`, of the dtype of x.
        table: int64 `[slots, n_slices, 4]`, a view with strides.
        slices: int32 `[n_slices, 2]`.
        metadata: what `LoRAKernelMeta.meta_args` gives.
        max_rank: no rank in `table` is larger.
        max_width: no width in `slices` is larger.
        alignment: a power of two that divides all starts and widths in `slices`.
    """
    _add(y, x, None, pool, table, slices, metadata, max_rank, max_width, alignment)


def _add_intervention(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    metadata: list[torch.Tensor],
    max_rank: int,
) -> None:
    """`engine_patch.kernels.reference.add_intervention_reference`; the rest is as for LoRA.

    Args:
        hidden: `[num_tokens, width]`, changed in place.
        residual: `[num_tokens, width]`, of the same dtype.
        slices: `[[0, width]]`.
    """
    assert residual.shape == hidden.shape
    assert residual.dtype == hidden.dtype
    assert residual.stride(1) == 1
    assert slices.size(0) == 1
    width = hidden.size(1)
    _add(hidden, hidden, residual, pool, table, slices, metadata, max_rank, width, common_alignment(width))


def _add(
    y: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    metadata: list[torch.Tensor],
    max_rank: int,
    max_width: int,
    alignment: int,
) -> None:
    """Both kernels. x may be y: shrink has read it before expand writes."""
    _, tokens, sizes, starts, slots, no_lora_flag_cpu, num_active_loras = metadata
    if x.size(0) == 0 or no_lora_flag_cpu.item():
        return
    assert x.dtype == pool.dtype
    assert y.size(0) == x.size(0)
    assert x.stride(1) == y.stride(1) == table.stride(2) == 1
    assert slices.is_contiguous()
    groups = Groups(tokens, sizes, starts, slots, int(num_active_loras.item()))
    n_slices = slices.size(0)
    tiles = choose_tiles(
        *(x.size(0), x.size(1), n_slices, max_rank, x.dtype == torch.float32, bool(envs.VLLM_BATCH_INVARIANT))
    )
    # Not zeroed: shrink writes every element that expand reads.
    padded_rank = -(-max_rank // RANK_UNIT) * RANK_UNIT
    shrunk = torch.empty((tiles.splits, n_slices, x.size(0), padded_rank), dtype=torch.float32, device=x.device)
    shrink(shrunk, x, residual, pool, table, groups, tiles)
    expand(y, shrunk, pool, table, slices, groups, tiles, max_width, alignment)


def _fake(*args: Any) -> None:
    """For tracing: the ops return nothing."""


direct_register_custom_op("preft_add_lora", _add_lora, ["y"], _fake)
direct_register_custom_op("preft_add_intervention", _add_intervention, ["hidden"], _fake)
add_lora = torch.ops.vllm.preft_add_lora
add_intervention = torch.ops.vllm.preft_add_intervention
