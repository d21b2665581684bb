"""Adapters in a pool, in plain PyTorch: what the kernels for GPUs compute, and what they are tested against.

`pool` is one flat tensor of weights. A row of `table` says where the weights of one adapter for one slice of a layer are:

    (a_offset, b_offset, rank, scale_bits)

The offsets count elements. A is stored row-major as `[rank, in_features]`; an intervention's bias, `[rank]`, lies right behind
it. B is stored transposed, row-major as `[rank, width]`, so that both are read along their rows. A rank of 0 says that the
adapter leaves this slice alone. The low 32 bits of `scale_bits` are those of the float32 `alpha / r`.
"""

from __future__ import annotations

import struct

import torch


def scale_to_bits(scale: float) -> int:
    """The bit pattern of a float32, as `table` holds it."""
    bits: int = struct.unpack("<I", struct.pack("<f", scale))[0]
    return bits


def bits_to_scale(bits: int) -> float:
    """The float32 in the low 32 bits."""
    scale: float = struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]
    return scale


def add_lora_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    token_kinds: torch.Tensor,
) -> None:
    """Add to every token what its adapter adds (Hu et al. 2021, arXiv 2106.09685).

        y[t, start : start + width] += scale * (x[t] @ A.T) @ B.T        B.T is what the pool holds

    for every token t with `kind = token_kinds[t] >= 0` and every slice that this adapter adapts. `x @ A.T` is accumulated
    in float32 and scaled there; it is then rounded to the pool's dtype for the second product, as the kernels round it.

    Args:
        y: `[num_tokens, sum of widths]`, changed in place.
        x: `[num_tokens, in_features]`.
        pool: `[num_elements]`.
        table: int64, `[kinds, n_slices, 4]`, of this layer.
        slices: int32, `[n_slices, 2]`: each fused slice's first column in y, and its width.
        token_kinds: `[num_tokens]`, negative for a token without an adapter.
    """
    _add(y, x, pool, table, slices, token_kinds, bias=False)


def add_intervention_reference(
    hidden: torch.Tensor,
    residual: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    token_kinds: torch.Tensor,
) -> None:
    """Let the adapter of every token act on the residual stream (DiReFT: Wu et al. 2024, arXiv 2404.03592).

        hidden[t] += scale * ((hidden[t] + residual[t]) @ A.T + bias) @ B.T        with a scale of 1; W1 = A, W2 = B.T

    The stream `hidden + residual` is rounded to their dtype, the bias is added in float32; the rest is as for LoRA.

    Args:
        hidden: `[num_tokens, width]`, changed in place.
        residual: `[num_tokens, width]`.
        pool: `[num_elements]`.
        table: int64, `[kinds, 1, 4]`, of this stream.
        slices: int32, `[[0, width]]`.
        token_kinds: `[num_tokens]`, negative for a token without an adapter.
    """
    _add(hidden, hidden + residual, pool, table, slices, token_kinds, bias=True)


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, `[num_tokens, width]`, of `[num_tokens, 2 * width]`: computed in float32 and rounded once."""
    gate, up = gate_up.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def _add(
    y: torch.Tensor,
    x: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    slices: torch.Tensor,
    token_kinds: torch.Tensor,
    *,
    bias: bool,
) -> None:
    for kind in sorted(set(token_kinds.tolist())):
        if kind < 0:
            continue
        rows = (token_kinds == kind).nonzero().squeeze(1)
        for row, (start, width) in zip(table[kind].tolist(), slices.tolist(), strict=True):
            delta = _delta(x[rows], pool, row, width, bias)
            if delta is not None:
                columns = slice(start, start + width)
                y[rows, columns] = (y[rows, columns].float() + delta).to(y.dtype)


def _delta(x: torch.Tensor, pool: torch.Tensor, row: list[int], width: int, bias: bool) -> torch.Tensor | None:
    """What one adapter adds to one slice, float32 `[num_rows, width]`, for `x` of shape `[num_rows, in_features]`."""
    a_offset, b_offset, rank, bits = row
    if rank == 0:
        return None
    a_end = a_offset + rank * x.shape[1]
    a = pool[a_offset:a_end].view(rank, x.shape[1])
    b = pool[b_offset : b_offset + rank * width].view(rank, width)
    shrunk = x.float() @ a.float().T
    if bias:
        shrunk += pool[a_end : a_end + rank].float()
    return (shrunk * bits_to_scale(bits)).to(pool.dtype).float() @ b.float()
