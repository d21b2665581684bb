"""The custom op around both kernels, `torch.ops.vllm.preft_add_lora`. torch.compile does not look inside.

Only a CUDA engine imports this module: it registers the op in vLLM's library.
"""

from __future__ import annotations

import torch
from vllm import envs
from vllm.utils.torch_utils import direct_register_custom_op

from engine_patch.kernels.tiles import RANK_UNIT, choose_tiles
from engine_patch.kernels.triton_lora import Groups, expand, shrink


def _add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    token_indices_sorted_by_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_token_start_loc: torch.Tensor,
    active_lora_ids: torch.Tensor,
    no_lora_flag_cpu: torch.Tensor,
    num_active_loras: torch.Tensor,
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
        token_lora_mapping: and the six after it, what `LoRAKernelMeta.meta_args` gives.
        max_rank: no rank in `table` is larger.
        max_width: no width in `slices` is larger.
        alignment: a power of two that divides all starts and widths in `slices`.
    """
    if x.size(0) == 0 or no_lora_flag_cpu.item():
        return
    assert x.dtype == pool.dtype
    assert y.size(0) == x.size(0)
    assert x.stride(1) == y.stride(1) == table.stride(2) == 1
    assert slices.is_contiguous()
    groups = Groups(
        token_indices_sorted_by_lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        active_lora_ids,
        int(num_active_loras.item()),
    )
    n_slices = slices.size(0)
    tiles = choose_tiles(
        *(x.size(0), x.size(1), n_slices, max_rank, x.dtype == torch.float32, bool(envs.VLLM_BATCH_INVARIANT))
    )
    # Not zeroed: shrink writes every element that expand reads.
    padded_rank = -(-max_rank // RANK_UNIT) * RANK_UNIT
    shrunk = torch.empty((tiles.splits, n_slices, x.size(0), padded_rank), dtype=torch.float32, device=x.device)
    shrink(shrunk, x, pool, table, groups, tiles)
    expand(y, shrunk, pool, table, slices, groups, tiles, max_width, alignment)


def _add_lora_fake(
    y: torch.Tensor,
    x: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    token_indices_sorted_by_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_token_start_loc: torch.Tensor,
    active_lora_ids: torch.Tensor,
    no_lora_flag_cpu: torch.Tensor,
    num_active_loras: torch.Tensor,
    max_rank: int,
    max_width: int,
    alignment: int = 1,
) -> None:
    """For tracing: the op returns nothing."""


direct_register_custom_op(op_name="preft_add_lora", op_func=_add_lora, mutates_args=["y"], fake_impl=_add_lora_fake)
add_lora = torch.ops.vllm.preft_add_lora
