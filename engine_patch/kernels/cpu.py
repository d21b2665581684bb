"""LoRA and DiReFT on CPU, one plain matrix product a segment, with the weights where the pool has them.

Upstream's `PunicaWrapperCPU` gathers a copy of the weights for every token, and gives the rows without an adapter (index
-1) the weights of the last slot, so that base requests in a mixed batch answer with somebody's adapter. Its buffers
also hold one segment a request, while ours can have two (adapted, then not). Here a step is a short list of segments of
adapted rows; rows without an adapter are in none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from engine_patch.kernels.reference import bits_to_scale
from engine_patch.kernels.step import Place, Runs, Segment, find_segments
from engine_patch.store.layout import PAGE_BYTES


class SegmentPunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc]
    """Upstream's interface on linear layers, computed segment by segment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.segments: list[Segment] = []

    def adopt(self, pool: torch.Tensor, table: torch.Tensor, slices: torch.Tensor) -> tuple[Any, Any]:
        """What a layer is to hand over as `lora_a_stacked` and `lora_b_stacked`: `(pool,)` and `(table, slices)`."""
        return (pool,), (table, slices)

    def begin_step(self, runs: Runs, places: Mapping[int, Place]) -> None:
        """Take the step's token map, and where its adapters are, by id."""
        self.segments = find_segments(runs, places)

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
            lora_b_stacked: `(table, slices)`, the table `[kinds, n_slices, 4]` (see `pool.share.Share.rows`).
            scale: always 1; each adapter has its own in the table.
            output_slices: width of each slice.
        """
        if not lora_a_stacked or not self.segments:
            return
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        (pool,), table = lora_a_stacked, lora_b_stacked[0]
        width_in = x.shape[1]
        for start, stop, place in self.segments:
            own, left = own_pages(pool, place), 0
            for (a, b, rank, bits), width in zip(table[place.kind].tolist(), output_slices, strict=True):
                if rank:
                    shrunk = x[start:stop] @ own[a : a + rank * width_in].view(rank, width_in).T
                    shrunk *= bits_to_scale(bits)
                    y[start:stop, left : left + width] += shrunk @ own[b : b + rank * width].view(rank, width)
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
        for start, stop, place in self.segments:
            ((a, b, rank, _),), own = table[place.kind].tolist(), own_pages(pool, place)
            if rank:
                end = a + rank * width
                stream, w1 = hidden[start:stop] + residual[start:stop], own[a:end].view(rank, width)
                shrunk = torch.addmm(own[end : end + rank], stream, w1.T)
                hidden[start:stop] += shrunk @ own[b : b + rank * width].view(rank, width)


def own_pages(pool: torch.Tensor, place: Place) -> torch.Tensor:
    """The pool from an adapter's first element on."""
    return pool[place.page * (PAGE_BYTES // pool.element_size()) :]


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
