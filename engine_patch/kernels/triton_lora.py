"""Two Triton kernels for adapters in a pool: shrink, `x @ A.T`, and expand, `y += ... @ B.T`.

An intervention on the residual stream is such a pair with `x = hidden + residual`, a bias between the products, and `y = hidden`.

`engine_patch.kernels.reference` tells how adapters lie in the pool and what is computed, `engine_patch.kernels.step` how a
step is cut into blocks. Each kernel covers all slices of a layer in one launch; a program reads of the device what its block is,
so a launch can be captured in a CUDA graph and replayed with other adapters. No atomics: where several programs share a sum, each
stores its part, and expand adds the parts in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_patch.kernels.launch import Launcher
from engine_patch.kernels.layer import Layer
from engine_patch.kernels.tiles import RANK_UNIT, choose_run

UNIT = tl.constexpr(RANK_UNIT)  # what a kernel may read of a module
ALIGNED = 16  # bytes


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
    STAGES: tl.constexpr,
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
        for step in tl.range(0, steps, num_stages=STAGES):
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
def load_shrunk(
    shrunk: tl.tensor,
    token: tl.tensor,
    is_row: tl.tensor,
    slice_id: tl.tensor,
    num_tokens: tl.tensor,
    n_slices: tl.tensor,
    splits: tl.tensor,
    rank_stride: tl.tensor,
    rank: tl.tensor,
    r: tl.tensor,
) -> tl.tensor:
    """The sum over splits of `shrunk[split, slice, token, r]`, `[ROWS, RANK]`."""
    mask = is_row[:, None] & (r < tl.cdiv(rank, UNIT) * UNIT)[None, :]
    tile = shrunk + (slice_id.to(tl.int64) * num_tokens + token[:, None]) * rank_stride + r[None, :]
    total = tl.load(tile, mask=mask, other=0.0)
    for _ in range(1, splits):
        tile += num_tokens.to(tl.int64) * n_slices * rank_stride
        total += tl.load(tile, mask=mask, other=0.0)
    return total


@triton.jit
def times_b(
    h: tl.tensor, b: tl.tensor, rank: tl.tensor, width: tl.tensor, r: tl.tensor, column: tl.tensor, total: tl.tensor
) -> tl.tensor:
    """`total + h @ B.T[r, column]`; h is `[ROWS, RANK]`."""
    mask = (r < rank)[:, None] & (column < width)[None, :]
    b_tile = tl.load(b + r[:, None] * width + column[None, :], mask=mask, other=0.0)
    return tl.dot(h.to(b_tile.dtype), b_tile, total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens", "n_slices", "splits", "runs", "run"])
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
    runs: tl.tensor,
    run: tl.tensor,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SINGLE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """`y[token, columns] += (sum over splits of shrunk[split, slice, token, :rank]) @ B.T[:, columns]`, `run` tiles a program.

    SINGLE: no rank is larger than a tile of ranks; then what shrink computed stays in registers over all columns.
    """
    part = tl.program_id(0) % (n_slices * runs)
    slice_id = part // runs
    first_column = part % runs * run * WIDTH

    # ALIGNMENT is a promise of the caller: without it, columns would be read and written one by one.
    width = tl.multiple_of(tl.load(slices + slice_id * 2 + 1), ALIGNMENT)
    if first_column >= width:
        return
    first, left, kind, page = find_block(blocks, tl.program_id(0) // (n_slices * runs), tl.load(blocks))
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
    y_rows = y + token[:, None] * y_stride + tl.multiple_of(tl.load(slices + slice_id * 2), ALIGNMENT)
    if SINGLE:
        r = tl.arange(0, RANK)
        h = load_shrunk(shrunk, token, is_row, slice_id, num_tokens, n_slices, splits, rank_stride, rank, r)
        for tile in tl.range(0, run, num_stages=STAGES):
            column = first_column + tile * WIDTH + tl.arange(0, WIDTH)
            mask = is_row[:, None] & (column < width)[None, :]
            before = tl.load(y_rows + column[None, :], mask=mask, other=0.0)
            total = times_b(h, b, rank, width, r, column, before.to(tl.float32))
            tl.store(y_rows + column[None, :], total.to(y.dtype.element_ty), mask=mask)
    else:
        for tile in range(run):
            column = first_column + tile * WIDTH + tl.arange(0, WIDTH)
            mask = is_row[:, None] & (column < width)[None, :]
            total = tl.load(y_rows + column[None, :], mask=mask, other=0.0).to(tl.float32)
            for first_rank in range(0, rank, RANK):
                r = first_rank + tl.arange(0, RANK)
                h = load_shrunk(shrunk, token, is_row, slice_id, num_tokens, n_slices, splits, rank_stride, rank, r)
                total = times_b(h, b, rank, width, r, column, total)
            tl.store(y_rows + column[None, :], total.to(y.dtype.element_ty), mask=mask)


_launch_shrink, _launch_expand = Launcher(_shrink_kernel), Launcher(_expand_kernel)


def shrink(layer: Layer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """What the second kernel reads, float32 `[splits, n_slices, num_tokens, padded_rank]`; no more of it has been written.

    `residual` makes interventions of the adapters.
    """
    (num_tokens, in_features), x_stride, shared = x.shape, x.stride(0), layer.shared
    tiles = layer.tiles(num_tokens)
    splits = layer.splits(num_tokens, in_features, tiles.rows)
    shrunk = x.new_empty((splits, layer.n_slices, num_tokens, layer.padded_rank), dtype=torch.float32)
    residual_stride = None if residual is None else residual.stride(0)
    aligned = x.data_ptr() % ALIGNED, residual is None or residual.data_ptr() % ALIGNED
    _launch_shrink(
        (shared.launched(num_tokens, only_adapted=True) * layer.n_slices * splits, 1, 1),
        (layer.number, x.dtype, tiles.rows, x_stride, residual_stride, aligned),
        (
            *(x, x_stride, residual, residual_stride, in_features),
            *(layer.pool, layer.table, layer.kind_stride),
            *(shared.blocks, shared.tokens),
            *(shrunk, num_tokens, layer.n_slices, splits, layer.padded_rank),
        ),
        (layer.page, tiles.rows, tiles.rank, tiles.depth, tiles.shrink_stages),
        tiles.shrink_warps,
    )
    return shrunk


def expand(layer: Layer, y: torch.Tensor, shrunk: torch.Tensor) -> None:
    """Add to y, `[num_tokens, sum of widths]`, in place; `shrunk` is what shrink gave."""
    num_tokens, y_stride, shared = y.size(0), y.stride(0), layer.shared
    tiles = layer.tiles(num_tokens)
    programs = shared.launched(num_tokens, only_adapted=True) * layer.n_slices
    runs, run = choose_run(layer.max_width, tiles.width, programs)
    _launch_expand(
        (programs * runs, 1, 1),
        (layer.number, y.dtype, tiles.rows, y_stride, y.data_ptr() % ALIGNED),
        (
            *(y, y_stride),
            *(shrunk, num_tokens, layer.n_slices, shrunk.size(0), layer.padded_rank),
            *(layer.pool, layer.table, layer.kind_stride, layer.slices),
            *(shared.blocks, shared.tokens, runs, run),
        ),
        (
            *(layer.page, tiles.rows, tiles.rank, layer.padded_rank <= tiles.rank),
            *(tiles.width, layer.alignment, tiles.expand_stages),
        ),
        tiles.expand_warps,
    )
