"""Two Triton kernels for adapters in a pool: shrink, `x @ A.T`, and expand, `y += ... @ B.T`.

An intervention on the residual stream is such a pair with `x = hidden + residual`, a bias between the products, and `y = hidden`.

`engine_patch.kernels.reference` tells how adapters lie in the pool and what is computed. Each kernel covers all slices of a
layer in one launch. Which programs have work is found on the device, in vLLM's metadata of the step, and the size of a grid
depends on the number of tokens and of slots only; so a launch can be captured in a CUDA graph and replayed with other
adapters. No atomics: where several programs share a sum, each stores its part, and expand adds the parts in order.

The metadata is that of `LoRAKernelMeta` in vLLM: tokens sorted by slot make groups, one for each slot in the step, and
one of slot -1 for the tokens without an adapter. Groups of no tokens come last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine_patch.kernels.tiles import RANK_UNIT, Tiles, power_of_two

UNIT = tl.constexpr(RANK_UNIT)  # what a kernel may read of a module


@dataclass(frozen=True)
class Groups:
    """The tokens of a step, sorted by slot.

    Attributes:
        tokens: int32 `[num_tokens]`, the sorted tokens' rows in x and y.
        sizes: int32 `[max_groups]`, the number of tokens of each group.
        starts: int32 `[max_groups + 1]`, each group's first place in `tokens`.
        slots: int32 `[max_groups]`, -1 for tokens without an adapter.
        limit: no more groups than this have tokens.
    """

    tokens: torch.Tensor
    sizes: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    limit: int

    def blocks(self, rows: int) -> int:
        """Enough blocks of `rows` tokens of one group each, however the tokens are spread over the groups."""
        return self.tokens.size(0) // rows + self.limit


@triton.jit
def _find_rows(
    block: tl.tensor,
    sizes: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    max_groups: tl.tensor,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The slot of a block of tokens, -1 if there is nothing to do; its first place in `tokens`; how many are left from there.

    Blocks are dealt out so that no program needs a sum over groups: group i begins at block `starts[i] // ROWS + i`. It
    then has room for all its blocks, since ceil(size / ROWS) <= end // ROWS - start // ROWS + 1.
    """
    every = tl.arange(0, GROUPS)
    is_group = every < max_groups
    size = tl.load(sizes + every, mask=is_group, other=0)
    start = tl.load(starts + every, mask=is_group, other=0)
    begins_before = (size > 0) & (start // ROWS + every <= block)
    group = tl.maximum(tl.sum(begins_before.to(tl.int32), axis=0) - 1, 0)  # without any group, the first has size 0
    group_start = tl.load(starts + group)
    first = (block - group_start // ROWS - group) * ROWS
    left = tl.load(sizes + group) - first
    slot = tl.where(left > 0, tl.load(slots + group), -1)
    return slot, group_start + first, left


@triton.jit(do_not_specialize=["n_slices", "max_groups", "num_tokens"])
def _shrink_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    residual: tl.tensor | None,
    residual_stride: tl.tensor | None,
    in_features: tl.tensor,
    pool: tl.tensor,
    table: tl.tensor,
    slot_stride: tl.tensor,
    slice_stride: tl.tensor,
    tokens: tl.tensor,
    sizes: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    max_groups: tl.tensor,
    shrunk: tl.tensor,
    num_tokens: tl.tensor,
    n_slices: tl.tensor,
    rank_stride: tl.tensor,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """`shrunk[split, slice, token, :padded rank] = scale * x[token, part] @ A[:, part].T`, a part of `in_features` a split.

    With a residual, x is `x + residual` and a bias, `[rank]` behind A, is added before the scale. Without one, it and its
    stride are None, of which Triton makes constants: nothing of interventions is left in the kernel that LoRA runs.
    """
    # The slices of a block are neighbours, so that all but the first find x in the L2 cache.
    part = tl.program_id(0) % (n_slices * SPLITS)
    block = tl.program_id(0) // (n_slices * SPLITS)
    slice_id = part // SPLITS
    split = part % SPLITS

    slot, first, left = _find_rows(block, sizes, starts, slots, max_groups, ROWS, GROUPS)
    if slot < 0:
        return
    entry = table + slot.to(tl.int64) * slot_stride + slice_id * slice_stride
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return
    a = pool + tl.multiple_of(tl.load(entry), 16)
    scale = tl.load(entry + 3).to(tl.int32).to(tl.float32, bitcast=True)

    row = tl.arange(0, ROWS)
    is_row = row < left
    token = tl.load(tokens + first + row, mask=is_row, other=0).to(tl.int64)
    x_rows = x + token[:, None] * x_stride
    if residual is not None:
        residual_rows = residual + token[:, None] * residual_stride
    shrunk_rows = shrunk + ((split * n_slices + slice_id).to(tl.int64) * num_tokens + token[:, None]) * rank_stride

    steps = tl.cdiv(in_features, DEPTH * SPLITS)
    for first_rank in range(0, rank, RANK):
        r = first_rank + tl.arange(0, RANK)
        total = tl.zeros((ROWS, RANK), dtype=tl.float32)
        for step in range(steps):
            k = (split * steps + step) * DEPTH + tl.arange(0, DEPTH)
            x_mask = is_row[:, None] & (k < in_features)[None, :]
            x_tile = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
            if residual is not None:  # rounded to their dtype, as PyTorch rounds the sum
                x_tile += tl.load(residual_rows + k[None, :], mask=x_mask, other=0.0)
            a_mask = (r < rank)[None, :] & (k < in_features)[:, None]
            a_tile = tl.load(a + r[None, :] * in_features + k[:, None], mask=a_mask, other=0.0)
            total = tl.dot(x_tile, a_tile, total, input_precision="ieee")
        if residual is not None:
            bias = tl.load(a + rank * in_features + r, mask=(r < rank) & (split == 0), other=0.0)  # once in a split sum
            total += bias.to(tl.float32)[None, :]
        is_stored = r < tl.cdiv(rank, UNIT) * UNIT  # 0 from rank on: so both kernels access whole vectors
        tl.store(shrunk_rows + r[None, :], total * scale, mask=is_row[:, None] & is_stored[None, :])


@triton.jit(do_not_specialize=["n_slices", "max_groups", "num_tokens", "width_blocks"])
def _expand_kernel(
    y: tl.tensor,
    y_stride: tl.tensor,
    shrunk: tl.tensor,
    num_tokens: tl.tensor,
    n_slices: tl.tensor,
    rank_stride: tl.tensor,
    pool: tl.tensor,
    table: tl.tensor,
    slot_stride: tl.tensor,
    slice_stride: tl.tensor,
    slices: tl.tensor,
    tokens: tl.tensor,
    sizes: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    max_groups: tl.tensor,
    width_blocks: tl.tensor,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """`y[token, columns] += (sum over splits of shrunk[split, slice, token, :rank]) @ B.T[:, columns]`."""
    part = tl.program_id(0) % (n_slices * width_blocks)
    block = tl.program_id(0) // (n_slices * width_blocks)
    slice_id = part // width_blocks
    first_column = part % width_blocks * WIDTH

    # ALIGNMENT is a promise of the caller: without it, columns would be read and written one by one.
    width = tl.multiple_of(tl.load(slices + slice_id * 2 + 1), ALIGNMENT)
    if first_column >= width:
        return
    slot, first, left = _find_rows(block, sizes, starts, slots, max_groups, ROWS, GROUPS)
    if slot < 0:
        return
    entry = table + slot.to(tl.int64) * slot_stride + slice_id * slice_stride
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return
    b = pool + tl.multiple_of(tl.load(entry + 1), 16)

    row = tl.arange(0, ROWS)
    is_row = row < left
    token = tl.load(tokens + first + row, mask=is_row, other=0).to(tl.int64)
    column = first_column + tl.arange(0, WIDTH)
    is_column = column < width
    y_start = tl.multiple_of(tl.load(slices + slice_id * 2), ALIGNMENT)
    y_tile = y + token[:, None] * y_stride + (y_start + column)[None, :]
    y_mask = is_row[:, None] & is_column[None, :]
    before = tl.load(y_tile, mask=y_mask, other=0.0)  # early, to be under way while the product is computed

    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for first_rank in range(0, rank, RANK):
        r = first_rank + tl.arange(0, RANK)
        h_mask = is_row[:, None] & (r < tl.cdiv(rank, UNIT) * UNIT)[None, :]
        h = tl.zeros((ROWS, RANK), dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            h_rows = ((split * n_slices + slice_id).to(tl.int64) * num_tokens + token[:, None]) * rank_stride
            h += tl.load(shrunk + h_rows + r[None, :], mask=h_mask, other=0.0)
        b_mask = (r < rank)[:, None] & is_column[None, :]
        b_tile = tl.load(b + r[:, None] * width + column[None, :], mask=b_mask, other=0.0)
        total = tl.dot(h.to(b_tile.dtype), b_tile, total, input_precision="ieee")
    tl.store(y_tile, (before.to(tl.float32) + total).to(y.dtype.element_ty), mask=y_mask)


def shrink(
    shrunk: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    pool: torch.Tensor,
    table: torch.Tensor,
    groups: Groups,
    tiles: Tiles,
) -> None:
    """Fill, of `shrunk`, what expand reads: float32 `[splits, n_slices, num_tokens, padded_rank]`.

    `padded_rank` is the largest rank, rounded up to a multiple of RANK_UNIT. `residual` makes interventions of the adapters.
    """
    splits, n_slices, num_tokens, padded_rank = shrunk.shape
    _shrink_kernel[(groups.blocks(tiles.rows) * n_slices * splits,)](
        x,
        x.stride(0),
        residual,
        None if residual is None else residual.stride(0),
        x.size(1),
        pool,
        table,
        table.stride(0),
        table.stride(1),
        groups.tokens,
        groups.sizes,
        groups.starts,
        groups.slots,
        groups.sizes.size(0),
        shrunk,
        num_tokens,
        n_slices,
        padded_rank,
        GROUPS=power_of_two(groups.sizes.size(0)),
        ROWS=tiles.rows,
        RANK=tiles.rank,
        DEPTH=tiles.depth,
        SPLITS=splits,
        num_warps=tiles.shrink_warps,
        num_stages=tiles.shrink_stages,
    )


def expand(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    groups: Groups,
    tiles: Tiles,
    max_width: int,
    alignment: int,
) -> None:
    """Add to y, `[num_tokens, sum of widths]`, in place; `shrunk` comes from `shrink` with the same tiles."""
    splits, n_slices, num_tokens, padded_rank = shrunk.shape
    width_blocks = triton.cdiv(max_width, tiles.width)
    _expand_kernel[(groups.blocks(tiles.rows) * n_slices * width_blocks,)](
        y,
        y.stride(0),
        shrunk,
        num_tokens,
        n_slices,
        padded_rank,
        pool,
        table,
        table.stride(0),
        table.stride(1),
        slices,
        groups.tokens,
        groups.sizes,
        groups.starts,
        groups.slots,
        groups.sizes.size(0),
        width_blocks,
        GROUPS=power_of_two(groups.sizes.size(0)),
        ROWS=tiles.rows,
        RANK=tiles.rank,
        SPLITS=splits,
        WIDTH=tiles.width,
        ALIGNMENT=alignment,
        num_warps=tiles.expand_warps,
        num_stages=tiles.expand_stages,
    )
