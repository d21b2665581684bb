"""A gated MLP's activation, `silu(gate) * up`, that lets adapters act on gate and up on the way.

Adding to the 2 x intermediate columns of gate and up by themselves is half of all bytes that LoRA on every linear layer moves in
a prefill step. The activation reads them anyhow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_patch.kernels.launch import Launcher
from engine_patch.kernels.tiles import Tiles
from engine_patch.kernels.triton_lora import Grid, Weights, expand_tile, find_block

PLAIN_WIDTH = 1024


@triton.jit
def silu_and_mul_tile(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """In float32, as Inductor compiles the base model's activation."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _plain_kernel(
    out: tl.tensor, gate_up: tl.tensor, row_stride: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + row * row_stride + column, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + column, mask=mask).to(tl.float32)
    tl.store(out + row * width + column, silu_and_mul_tile(gate, up).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "splits", "width_blocks"])
def _adapted_kernel(
    out: tl.tensor,
    gate_up: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    shrunk: tl.tensor,
    num_tokens: tl.tensor,
    splits: tl.tensor,
    rank_stride: tl.tensor,
    pool: tl.tensor,
    table: tl.tensor,
    kind_stride: tl.tensor,
    blocks: tl.tensor,
    tokens: tl.tensor,
    width_blocks: tl.tensor,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """`silu(gate + ...) * (up + ...)` for blocks with and without an adapter; both sums are rounded as y of expand is."""
    first, left, kind, page = find_block(blocks, tl.program_id(0) // width_blocks, tl.load(blocks + 1))
    if left == 0:
        return
    is_adapted = kind >= 0
    entry = table + kind.to(tl.int64) * kind_stride
    gate_rank = tl.load(entry + 2, mask=is_adapted, other=0).to(tl.int32)
    up_rank = tl.load(entry + 4 + 2, mask=is_adapted, other=0).to(tl.int32)
    own = pool + page * PAGE
    gate_b = own + tl.multiple_of(tl.load(entry + 1, mask=is_adapted, other=0), 16)
    up_b = own + tl.multiple_of(tl.load(entry + 4 + 1, mask=is_adapted, other=0), 16)

    row = tl.arange(0, ROWS)
    is_row = row < left
    token = tl.load(tokens + first + row, mask=is_row, other=0).to(tl.int64)
    column = tl.program_id(0) % width_blocks * WIDTH + tl.arange(0, WIDTH)
    mask = is_row[:, None] & (column < width)[None, :]
    gate_tile = gate_up + token[:, None] * row_stride + column[None, :]
    gate = tl.load(gate_tile, mask=mask, other=0.0)
    up = tl.load(gate_tile + width, mask=mask, other=0.0)

    zeros = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    gate_id = tl.program_id(0) * 0
    gate_delta = expand_tile(
        zeros,
        shrunk,
        token,
        is_row,
        gate_id,
        num_tokens,
        2,
        splits,
        rank_stride,
        gate_b,
        gate_rank,
        width,
        column,
        RANK,
    )
    up_delta = expand_tile(
        zeros,
        shrunk,
        token,
        is_row,
        gate_id + 1,
        num_tokens,
        2,
        splits,
        rank_stride,
        up_b,
        up_rank,
        width,
        column,
        RANK,
    )
    gate = (gate.to(tl.float32) + gate_delta).to(out.dtype.element_ty).to(tl.float32)
    up = (up.to(tl.float32) + up_delta).to(out.dtype.element_ty).to(tl.float32)
    tl.store(
        out + token[:, None] * width + column[None, :], silu_and_mul_tile(gate, up).to(out.dtype.element_ty), mask=mask
    )


_launch_plain, _launch_adapted = Launcher(_plain_kernel), Launcher(_adapted_kernel)


def silu_and_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """`out[t] = silu(gate_up[t, :width]) * gate_up[t, width:]`; out is `[num_tokens, width]`."""
    num_tokens, width = out.shape
    grid = (num_tokens, triton.cdiv(width, PLAIN_WIDTH))
    _launch_plain(grid, (out, gate_up, gate_up.stride(0), width), {"BLOCK": PLAIN_WIDTH}, num_warps=4, num_stages=1)


def silu_and_mul_adapted(
    out: torch.Tensor, gate_up: torch.Tensor, shrunk: torch.Tensor, weights: Weights, grid: Grid, tiles: Tiles
) -> None:
    """The same of what `expand` would have left in gate_up; `grid` covers all blocks of the step, which must be all tokens."""
    splits, _, num_tokens, padded_rank = shrunk.shape
    width = out.size(1)
    width_blocks = triton.cdiv(width, tiles.width)
    _launch_adapted(
        (grid.launched * width_blocks,),
        (
            out,
            gate_up,
            gate_up.stride(0),
            width,
            shrunk,
            num_tokens,
            splits,
            padded_rank,
            weights.pool,
            weights.table,
            weights.table.stride(0),
            grid.blocks,
            grid.tokens,
            width_blocks,
        ),
        {"PAGE": weights.page, "ROWS": tiles.rows, "RANK": tiles.rank, "WIDTH": tiles.width},
        num_warps=tiles.expand_warps,
        num_stages=tiles.expand_stages,
    )
