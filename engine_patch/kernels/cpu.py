"""LoRA and DiReFT on CPU, one plain matrix product a segment, with the weights where the pool has them.

Upstream's `PunicaWrapperCPU` gathers a copy of the weights for every token, and gives the rows without an adapter (index
-1) the weights of the last slot, so that base requests in a mixed batch answer with somebody's adapter. Its buffers
also hold one segment a request, while ours can have two (adapted, then not). Here a step is a short list of segments of
adapted rows; rows without an adapter are in none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from engine_patch.kernels.reference import bits_to_scale


class Segment(NamedTuple):
    """Rows `start .. stop - 1` of the step use the adapter in `slot`."""

    start: int
    stop: int
    slot: int


def find_segments(adapter_ids: Sequence[int], slot_of: dict[int, int]) -> list[Segment]:
    """Runs of equal, non-zero adapter ids among the tokens of a step, `[num_tokens]`."""
    segments, start = [], 0
    for adapter_id, run in groupby(adapter_ids):
        stop = start + sum(1 for _ in run)
        if adapter_id > 0:
            segments.append(Segment(start, stop, slot_of[adapter_id]))
        start = stop
    return segments


class SegmentPunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc]
    """Upstream's interface on linear layers, computed segment by segment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.segments: list[Segment] = []

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Take the step's token map."""
        slot_of = {id_: slot for slot, id_ in enumerate(lora_index_to_id) if id_ is not None}
        self.segments = find_segments(mapping.index_mapping, slot_of)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """`y[segment, slice] += scaling * (x[segment] @ A.T) @ B.T` for every segment and fused slice.

        Args:
            y: `[num_tokens, sum(output_slices)]`, changed in place.
            x: `[num_tokens, in_features]`.
            lora_a_stacked: `(pool,)`, the pool `[num_elements]`; empty for a layer that no adapter adapts.
            lora_b_stacked: `(table, slices)`, the table `[slots, n_slices, 4]` (see `pool.share.Share.rows`).
            scale: always 1; each adapter has its own in the table.
            output_slices: width of each slice.
        """
        if not lora_a_stacked or not self.segments:
            return
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        (pool,), table = lora_a_stacked, lora_b_stacked[0]
        width_in = x.shape[1]
        for segment in self.segments:
            rows, left = slice(segment.start, segment.stop), 0
            for (a, b, rank, bits), width in zip(table[segment.slot].tolist(), output_slices, strict=True):
                if rank:
                    shrunk = x[rows] @ pool[a : a + rank * width_in].view(rank, width_in).T
                    shrunk *= bits_to_scale(bits)
                    y[rows, left : left + width] += shrunk @ pool[b : b + rank * width].view(rank, width)
                left += width

    def add_intervention(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
    ) -> None:
        """`hidden[segment] += (h[segment] @ W1.T + b) @ W2` for every segment, where h is `hidden + residual`.

        Args:
            hidden: `[num_tokens, width]`, changed in place.
            residual: `[num_tokens, width]`.
            lora_a_stacked: as of a linear layer.
            lora_b_stacked: as of a linear layer with one slice.
        """
        if not lora_a_stacked or not self.segments:
            return
        (pool,), table, width = lora_a_stacked, lora_b_stacked[0], hidden.shape[1]
        for segment in self.segments:
            ((a, b, rank, _),), rows = table[segment.slot].tolist(), slice(segment.start, segment.stop)
            if rank:
                end = a + rank * width
                stream, w1 = hidden[rows] + residual[rows], pool[a:end].view(rank, width)
                shrunk = torch.addmm(pool[end : end + rank], stream, w1.T)
                hidden[rows] += shrunk @ pool[b : b + rank * width].view(rank, width)


def bypass(layer: Any) -> None:
    """Let a step without adapted tokens run the base model's own layer in place of vLLM's wrapper of it.

    In eager mode the wrapper's Python costs a decode step of a small model 5% (`tests/benchmarks/bench_decode.py`).
    """
    wrapper, adapted, base = layer.punica_wrapper, layer.forward, layer.base_layer.forward
    layer.forward = lambda *args, **kwargs: (adapted if wrapper.segments else base)(*args, **kwargs)


def patch() -> None:
    """Let the CPU platform choose this class."""
    from vllm.platforms.cpu import CpuPlatform

    from engine_patch.patching import put

    name = f"{SegmentPunicaWrapper.__module__}.{SegmentPunicaWrapper.__qualname__}"
    put(CpuPlatform, "get_punica_wrapper", classmethod(lambda cls: name))
