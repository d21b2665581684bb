"""LoRA on CPU, one plain matrix product a segment.

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
        self.adapts_logits = False

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Take the step's token map. The sampler's indices are set too, for stock adapters on the LM head."""
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        slot_of = {id_: slot for slot, id_ in enumerate(lora_index_to_id) if id_ is not None}
        self.segments = find_segments(mapping.index_mapping, slot_of)
        self.adapts_logits = any(mapping.prompt_mapping)

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
        """`y[segment, slice] += scale * (x[segment] @ A[slot].T) @ B[slot].T` for every segment and fused slice.

        Args:
            y: `[num_tokens, sum(output_slices)]`, changed in place.
            x: `[num_tokens, in_features]`.
            lora_a_stacked: for each slice `[slots, 1, max_rank, in_features]`.
            lora_b_stacked: for each slice `[slots, 1, out_features, max_rank]`.
        """
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for segment in self.segments:
            rows = slice(segment.start, segment.stop)
            left = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                shrunk = x[rows] @ a[segment.slot, 0].T
                y[rows, left : left + width] += scale * (shrunk @ b[segment.slot, 0].T)
                left += width

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The LM head: nothing to add unless a stock adapter samples in this step; ours are refused there.

        Upstream multiplies in any case, by one row for each sampled token: it fails on the rows of prompt log-probabilities, and
        gives the rows without an adapter the weights of the last slot.

        Args:
            y: logits, `[num_rows, vocab]`, changed in place.
            x: hidden states, `[num_rows, hidden]`.
        """
        if self.adapts_logits:
            without = self.sampler_indices < 0
            kept = y[without].clone()
            super().add_lora_logits(y, x, *args, **kwargs)
            y[without] = kept
        return y


def patch() -> None:
    """Let the CPU platform choose this class."""
    from vllm.platforms.cpu import CpuPlatform

    from engine_patch.patching import replace

    name = f"{SegmentPunicaWrapper.__module__}.{SegmentPunicaWrapper.__qualname__}"
    replace(CpuPlatform, "get_punica_wrapper", lambda upstream: classmethod(lambda cls: name))
