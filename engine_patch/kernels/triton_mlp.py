"""A gated MLP's activation, `silu(gate) * up`, that lets adapters act on gate and up on the way.

Adding to the 2 x intermediate columns of gate and up by themselves is half of all bytes that LoRA on every linear layer moves in
a prefill step. The activation reads them anyhow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_patch.kernels.launch import Launcher
from engine_patch.kernels.layer import Layer
from engine_patch.kernels.tiles import choose_run
from engine_patch.kernels.triton_lora import ALIGNED, find_block, load_shrunk, times_b

PLAIN_WIDTH = 1024


@triton.jit
def silu_and_mul_tile(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """In float32, as Inductor compiles the base model's activation."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def store_rounded(tile: tl.tensor, gate: tl.tensor, up: tl.tensor, mask: tl.tensor) -> None:
    """The activation of gate and up, each rounded to the dtype that it would be stored in."""
    dtype = tile.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    tl.store(tile, silu_and_mul_tile(gate, up).to(dtype), mask=mask)


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


@triton.jit(do_not_specialize=["num_tokens", "splits", "runs", "run"])
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
    runs: tl.tensor,
    run: tl.tensor,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SINGLE: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """`silu(gate + ...) * (up + ...)` for blocks with and without an adapter; both sums are rounded as y of expand is."""
    first, left, kind, page = find_block(blocks, tl.program_id(0) // runs, tl.load(blocks + 1))
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
    rows, out_rows = gate_up + token[:, None] * row_stride, out + token[:, None] * width
    first_column = tl.program_id(0) % runs * run * WIDTH
    gate_id = tl.program_id(0) * 0
    if SINGLE:
        r = tl.arange(0, RANK)
        gate_h = load_shrunk(shrunk, token, is_row, gate_id, num_tokens, 2, splits, rank_stride, gate_rank, r)
        up_h = load_shrunk(shrunk, token, is_row, gate_id + 1, num_tokens, 2, splits, rank_stride, up_rank, r)
        for tile in tl.range(0, run, num_stages=STAGES):
            column = first_column + tile * WIDTH + tl.arange(0, WIDTH)
            mask = is_row[:, None] & (column < width)[None, :]
            gate = tl.load(rows + column[None, :], mask=mask, other=0.0).to(tl.float32)
            up = tl.load(rows + width + column[None, :], mask=mask, other=0.0).to(tl.float32)
            gate = times_b(gate_h, gate_b, gate_rank, width, r, column, gate)
            up = times_b(up_h, up_b, up_rank, width, r, column, up)
            store_rounded(out_rows + column[None, :], gate, up, mask)
    else:
        for tile in range(run):
            column = first_column + tile * WIDTH + tl.arange(0, WIDTH)
            mask = is_row[:, None] & (column < width)[None, :]
            gate = tl.load(rows + column[None, :], mask=mask, other=0.0).to(tl.float32)
            up = tl.load(rows + width + column[None, :], mask=mask, other=0.0).to(tl.float32)
            for first_rank in range(0, gate_rank, RANK):
                r = first_rank + tl.arange(0, RANK)
                h = load_shrunk(shrunk, token, is_row, gate_id, num_tokens, 2, splits, rank_stride, gate_rank, r)
                gate = times_b(h, gate_b, gate_rank, width, r, column, gate)
            for first_rank in range(0, up_rank, RANK):
                r = first_rank + tl.arange(0, RANK)
                h = load_shrunk(shrunk, token, is_row, gate_id + 1, num_tokens, 2, splits, rank_stride, up_rank, r)
                up = times_b(h, up_b, up_rank, width, r, column, up)
            store_rounded(out_rows + column[None, :], gate, up, mask)


_launch_plain, _launch_adapted = Launcher(_plain_kernel), Launcher(_adapted_kernel)


def silu_and_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """`out[t] = silu(gate_up[t, :width]) * gate_up[t, width:]`; out is `[num_tokens, width]`."""
    (num_tokens, width), stride = out.shape, gate_up.stride(0)
    variant = out.device.index, out.dtype, gate_up.data_ptr() % ALIGNED, stride, width
    _launch_plain(
        (num_tokens, -(-width // PLAIN_WIDTH), 1), variant, (out, gate_up, stride, width), (PLAIN_WIDTH,), warps=4
    )


def silu_and_mul_adapted(layer: Layer, out: torch.Tensor, gate_up: torch.Tensor, shrunk: torch.Tensor) -> None:
    """The same of what `expand` would have left in gate_up, for all blocks of the step, which must be all tokens."""
    (num_tokens, width), stride, shared = out.shape, gate_up.stride(0), layer.shared
    tiles = layer.tiles(num_tokens)
    launched = shared.launched(num_tokens, only_adapted=False)
    runs, run = choose_run(width, tiles.width, launched)
    _launch_adapted(
        (launched * runs, 1, 1),
        (layer.number, out.dtype, tiles.rows, stride, gate_up.data_ptr() % ALIGNED),
        (
            *(out, gate_up, stride, width),
            *(shrunk, num_tokens, shrunk.size(0), layer.padded_rank),
            *(layer.pool, layer.table, layer.kind_stride),
            *(shared.blocks, shared.tokens, runs, run),
        ),
        (
            *(layer.page, tiles.rows, tiles.rank, layer.padded_rank <= tiles.rank),
            *(tiles.width, tiles.expand_stages),
        ),
        tiles.expand_warps,
    )
