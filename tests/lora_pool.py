"""Random adapters in a pool, and the metadata of random steps: for the tests and measurements of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_patch.kernels.reference import scale_to_bits

ALIGNMENT = 16
"""Offsets in a pool are multiples of so many elements."""


@dataclass(frozen=True)
class Layer:
    """One layer's share of a pool.

    Attributes:
        pool: `[num_elements]`.
        table: int64 `[slots, n_slices, 4]`, a view of a table of more slices.
        slices: int32 `[n_slices, 2]`.
        in_features, widths, max_rank: sizes.
    """

    pool: torch.Tensor
    table: torch.Tensor
    slices: torch.Tensor
    in_features: int
    widths: tuple[int, ...]
    max_rank: int

    def on(self, device: str) -> Layer:
        """The same on a device; the table stays a view."""
        table = torch.zeros(self.table.size(0), self.table.size(1) + 3, 4, dtype=torch.int64, device=device)
        table[:, 1:-2] = self.table.to(device)
        return Layer(
            *(self.pool.to(device), table[:, 1:-2], self.slices.to(device)),
            *(self.in_features, self.widths, self.max_rank),
        )


def make_layer(
    in_features: int,
    widths: Sequence[int],
    ranks: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    skip: int = 0,
    device: str = "cpu",
) -> Layer:
    """A layer whose adapter in slot s has rank `ranks[s][i]` on slice i.

    Unused elements, among them the first `skip`, are NaN, so that reading them would show. x and y of variance 1 fit the
    weights' scale: what is added is of the size of y.
    """
    generator = torch.Generator(device).manual_seed(seed)
    table = torch.zeros(len(ranks), len(widths), 4, dtype=torch.int64)
    size, weights = skip + ALIGNMENT, []
    for slot, of_slices in enumerate(ranks):
        for index, (rank, width) in enumerate(zip(of_slices, widths, strict=True)):
            scale = 0.5 + (slot + index) % 4
            place = []
            for columns, spread in ((in_features, in_features**-0.5), (width, max(1, rank) ** -0.5 / scale)):
                numbers = torch.randn(rank * columns, generator=generator, device=device, dtype=torch.float32)
                weights.append((size, (numbers * spread).to(dtype)))
                place.append(size)
                size += -(-(rank * columns + 1) // ALIGNMENT) * ALIGNMENT
            table[slot, index] = torch.tensor([*place, rank, scale_to_bits(scale)])
    pool = torch.full((size,), float("nan"), dtype=dtype, device=device)
    for offset, numbers in weights:
        pool[offset : offset + numbers.numel()] = numbers
    starts = [sum(widths[:index]) for index in range(len(widths))]
    slices = torch.tensor(list(zip(starts, widths, strict=True)), dtype=torch.int32)
    max_rank = max(1, *(max(of_slices) for of_slices in ranks))
    return Layer(pool, table, slices, in_features, tuple(widths), max_rank).on(device)


def step_metadata(token_slots: torch.Tensor, num_slots: int, captured: int | None = None) -> tuple[torch.Tensor, ...]:
    """vLLM's own metadata for a step of these tokens, as linear layers get it.

    Args:
        token_slots: int64 `[num_tokens]`, -1 for a token without an adapter.
        num_slots: vLLM's `max_loras`.
        captured: the number of tokens of the captured graph, which may be more than the step has.
    """
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    num_tokens = captured or token_slots.size(0)
    meta = LoRAKernelMeta.make(num_slots, num_tokens, device=token_slots.device)
    meta.token_lora_mapping.fill_(-1)
    meta.token_indices_sorted_by_lora_ids.fill_(0)
    meta.prepare_tensors(token_slots)
    result: tuple[torch.Tensor, ...] = meta.meta_args(num_tokens, False)
    return result


def inputs(layer: Layer, num_tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random y, `[num_tokens, sum of widths]`, and x, `[num_tokens, in_features]`."""
    generator = torch.Generator(layer.pool.device).manual_seed(seed)

    def draw(columns: int) -> torch.Tensor:
        numbers = torch.randn(num_tokens, columns, generator=generator, device=layer.pool.device)
        return numbers.to(layer.pool.dtype)

    return draw(sum(layer.widths)), draw(layer.in_features)


def add_lora(
    y: torch.Tensor, x: torch.Tensor, layer: Layer, metadata: tuple[torch.Tensor, ...], align: int = 1
) -> None:
    """The kernels, through the custom op."""
    from engine_patch.kernels import op

    op.add_lora(
        *(y, x, layer.pool, layer.table, layer.slices, *metadata),
        *(layer.max_rank, max(layer.widths), align),
    )


def untouched(layer: Layer, token_slots: torch.Tensor) -> torch.Tensor:
    """Bool `[num_tokens, sum of widths]`: the elements of y that no adapter adapts."""
    adapted = (layer.table[:, :, 2] > 0).repeat_interleave(layer.slices[:, 1].long(), dim=1)
    return ~(adapted[token_slots.clamp_min(0)] & (token_slots >= 0)[:, None])
