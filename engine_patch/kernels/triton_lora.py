"""Two Triton kernels for adapters in a pool: shrink, `x @ A.T`, and expand, `y += ... @ B.T`.

An intervention on the residual stream is such a pair with `x = hidden + residual`, a bias between the products, and `y = hidden`.

`engine_patch.kernels.reference` tells how adapters lie in the pool and what is computed, `engine_patch.kernels.step` how a
step is cut into blocks. Each kernel covers all slices of a layer in one launch; a program reads of the device what its block is,
so a launch can be captured in a CUDA graph and replayed with other adapters. No atomics: where several programs share a sum, each
stores its part, and expand adds the parts in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine_patch.kernels.launch import Launcher
from engine_patch.kernels.tiles import RANK_UNIT, Tiles
from engine_patch.store.layout import PAGE_BYTES

UNIT = tl.constexpr(RANK_UNIT)  # what a kernel may read of a module


@dataclass(frozen=True)
class Weights:
    """The adapters of one layer.

    Attributes:
        pool: `[num_elements]`.
        table: int64 `[kinds, n_slices, 4]`, a view with strides.
        slices: int32 `[n_slices, 2]`: first column and width.
    """

    pool: torch.Tensor
    table: torch.Tensor
    slices: torch.Tensor

    @property
    def page(self) -> int:
        """Elements of a page."""
        return PAGE_BYTES // self.pool.element_size()


@dataclass(frozen=True)
class Grid:
    """A step's blocks on the device.

    Attributes:
        blocks: int32 `[1 + most, 4]`: the number of adapted blocks, of all, and two zeros; then `step.Blocks.blocks`.
        tokens: int32 `[most]`: `step.Blocks.tokens`.
        launched: blocks to launch programs for; those that the step does not have end at once.
    """

    blocks: torch.Tensor
    tokens: torch.Tensor
    launched: int


@triton.jit
def find_block(
    blocks: tl.tensor, block: tl.tensor, count: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """First place in `tokens`, number of tokens, kind and page of a block; no tokens if the step has only `count` blocks."""
    entry = blocks + (block + 1) * 4
    left = tl.where(block < count, tl.load(entry + 1), 0)
    return tl.load(entry), left, tl.load(entry + 2), tl.load(entry + 3).to(tl.int64)


@triton.jit(do_not_specialize=["num_tokens", "n_slices", "splits"])
def _shrink_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    residual: tl.tensor | None,
    residual_stride: tl.tensor | None,
    in_features: tl.tensor,
    pool: tl.tensor,
    table: tl.tensor,
    kind_stride: tl.tensor,
    blocks: tl.tensor,
    tokens: tl.tensor,
    shrunk: tl.tensor,
    num_tokens: tl.tensor,
    n_slices: tl.tensor,
    splits: tl.tensor,
    rank_stride: tl.tensor,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """`shrunk[split, slice, token, :padded rank] = scale * x[token, part] @ A[:, part].T`, a part of `in_features` a split.

    With a residual, x is `x + residual` and a bias, `[rank]` behind A, is added before the scale. Without one, it and its
    stride are None, of which Triton makes constants: nothing of interventions is left in the kernel that LoRA runs.
    """
    # The slices of a block are neighbours, so that all but the first find x in the L2 cache.
    part = tl.program_id(0) % (n_slices * splits)
    slice_id = part // splits
    split = part % splits
    first, left, kind, page = find_block(blocks, tl.program_id(0) // (n_slices * splits), tl.load(blocks))
    if left == 0:
        return
    entry = table + kind.to(tl.int64) * kind_stride + slice_id * 4
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return
    a = pool + page * PAGE + tl.multiple_of(tl.load(entry), 16)
    scale = tl.load(entry + 3).to(tl.int32).to(tl.float32, bitcast=True)

    row = tl.arange(0, ROWS)
    is_row = row < left
    token = tl.load(tokens + first + row, mask=is_row, other=0).to(tl.int64)
    x_rows = x + token[:, None] * x_stride
    if residual is not None:
        residual_rows = residual + token[:, None] * residual_stride
    shrunk_rows = shrunk + ((split * n_slices + slice_id).to(tl.int64) * num_tokens + token[:, None]) * rank_stride

    steps = tl.cdiv(in_features, DEPTH * splits)
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


@triton.jit
def expand_tile(
    total: tl.tensor,
    shrunk: tl.tensor,
    token: tl.tensor,
    is_row: tl.tensor,
    slice_id: tl.tensor,
    num_tokens: tl.tensor,
    n_slices: tl.tensor,
    splits: tl.tensor,
    rank_stride: tl.tensor,
    b: tl.tensor,
    rank: tl.tensor,
    width: tl.tensor,
    column: tl.tensor,
    RANK: tl.constexpr,
) -> tl.tensor:
    """`total + (sum over splits of shrunk[split, slice, token, :rank]) @ B.T[:, column]`, `[ROWS, WIDTH]`."""
    is_column = column < width
    for first_rank in range(0, rank, RANK):
        r = first_rank + tl.arange(0, RANK)
        h_mask = is_row[:, None] & (r < tl.cdiv(rank, UNIT) * UNIT)[None, :]
        h_tile = shrunk + (slice_id.to(tl.int64) * num_tokens + token[:, None]) * rank_stride + r[None, :]
        h = tl.load(h_tile, mask=h_mask, other=0.0)
        for _ in range(1, splits):
            h_tile += num_tokens.to(tl.int64) * n_slices * rank_stride
            h += tl.load(h_tile, mask=h_mask, other=0.0)
        b_mask = (r < rank)[:, None] & is_column[None, :]
        b_tile = tl.load(b + r[:, None] * width + column[None, :], mask=b_mask, other=0.0)
        total = tl.dot(h.to(b_tile.dtype), b_tile, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_tokens", "n_slices", "splits", "width_blocks"])
def _expand_kernel(
    y: tl.tensor,
    y_stride: tl.tensor,
    shrunk: tl.tensor,
    num_tokens: tl.tensor,
    n_slices: tl.tensor,
    splits: tl.tensor,
    rank_stride: tl.tensor,
    pool: tl.tensor,
    table: tl.tensor,
    kind_stride: tl.tensor,
    slices: tl.tensor,
    blocks: tl.tensor,
    tokens: tl.tensor,
    width_blocks: tl.tensor,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """`y[token, columns] += (sum over splits of shrunk[split, slice, token, :rank]) @ B.T[:, columns]`."""
    part = tl.program_id(0) % (n_slices * width_blocks)
    slice_id = part // width_blocks
    first_column = part % width_blocks * WIDTH

    # ALIGNMENT is a promise of the caller: without it, columns would be read and written one by one.
    width = tl.multiple_of(tl.load(slices + slice_id * 2 + 1), ALIGNMENT)
    if first_column >= width:
        return
    first, left, kind, page = find_block(blocks, tl.program_id(0) // (n_slices * width_blocks), tl.load(blocks))
    if left == 0:
        return
    entry = table + kind.to(tl.int64) * kind_stride + slice_id * 4
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return
    b = pool + page * PAGE + tl.multiple_of(tl.load(entry + 1), 16)

    row = tl.arange(0, ROWS)
    is_row = row < left
    token = tl.load(tokens + first + row, mask=is_row, other=0).to(tl.int64)
    column = first_column + tl.arange(0, WIDTH)
    y_start = tl.multiple_of(tl.load(slices + slice_id * 2), ALIGNMENT)
    y_tile = y + token[:, None] * y_stride + (y_start + column)[None, :]
    y_mask = is_row[:, None] & (column < width)[None, :]
    before = tl.load(y_tile, mask=y_mask, other=0.0)  # early, to be under way while the product is computed

    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    total = expand_tile(
        total, shrunk, token, is_row, slice_id, num_tokens, n_slices, splits, rank_stride, b, rank, width, column, RANK
    )
    tl.store(y_tile, (before.to(tl.float32) + total).to(y.dtype.element_ty), mask=y_mask)


_launch_shrink, _launch_expand = Launcher(_shrink_kernel), Launcher(_expand_kernel)


def shrink(
    shrunk: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weights: Weights,
    grid: Grid,
    tiles: Tiles,
) -> None:
    """Fill, of `shrunk`, what expand reads: float32 `[splits, n_slices, num_tokens, padded_rank]`.

    `padded_rank` is the largest rank, rounded up to a multiple of RANK_UNIT. `residual` makes interventions of the adapters.
    """
    splits, n_slices, num_tokens, padded_rank = shrunk.shape
    _launch_shrink(
        (grid.launched * n_slices * splits,),
        (
            x,
            x.stride(0),
            residual,
            None if residual is None else residual.stride(0),
            x.size(1),
            weights.pool,
            weights.table,
            weights.table.stride(0),
            grid.blocks,
            grid.tokens,
            shrunk,
            num_tokens,
            n_slices,
            splits,
            padded_rank,
        ),
        {"PAGE": weights.page, "ROWS": tiles.rows, "RANK": tiles.rank, "DEPTH": tiles.depth},
        num_warps=tiles.shrink_warps,
        num_stages=tiles.shrink_stages,
    )


def expand(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    weights: Weights,
    grid: Grid,
    tiles: Tiles,
    max_width: int,
    alignment: int,
) -> None:
    """Add to y, `[num_tokens, sum of widths]`, in place; `shrunk` comes from `shrink` with the same tiles."""
    splits, n_slices, num_tokens, padded_rank = shrunk.shape
    width_blocks = triton.cdiv(max_width, tiles.width)
    _launch_expand(
        (grid.launched * n_slices * width_blocks,),
        (
            y,
            y.stride(0),
            shrunk,
            num_tokens,
            n_slices,
            splits,
            padded_rank,
            weights.pool,
            weights.table,
            weights.table.stride(0),
            weights.slices,
            grid.blocks,
            grid.tokens,
            width_blocks,
        ),
        {
            "PAGE": weights.page,
            "ROWS": tiles.rows,
            "RANK": tiles.rank,
            "WIDTH": tiles.width,
            "ALIGNMENT": alignment,
        },
        num_warps=tiles.expand_warps,
        num_stages=tiles.expand_stages,
    )
