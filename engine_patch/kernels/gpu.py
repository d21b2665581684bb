"""Adapters on CUDA GPUs from one pool of them, in place of an array of slots for each layer.

Upstream sorts and counts the step's tokens on the device and waits for the result, so that no step is prepared while another is
computed. Here the step arrives as arrays of the host, and is copied over without waiting.

Only a CUDA engine imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from engine_patch.kernels.op import (
    ADAPTED,
    ALL,
    LINEAR,
    STREAMS,
    add_intervention,
    add_lora,
    add_lora_silu_and_mul,
    is_invariant,
)
from engine_patch.kernels.step import Place, Runs, cut
from engine_patch.kernels.tiles import block_rows, common_alignment, most_blocks


class Step:
    """A step's blocks, on the host and the device, in tensors that stay: compiled code and graphs hold them."""

    def __init__(self, max_tokens: int, max_adapters: int, max_rank: int, device: torch.device | str) -> None:
        self._max_rank = max_rank
        most = most_blocks(max_tokens, max_adapters, max_rank, is_invariant())
        self._counts = np.zeros(4, dtype=np.int32)
        self.counts = torch.from_numpy(self._counts)
        self.blocks = torch.zeros(1 + most, 4, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(max_tokens, dtype=torch.int32, device=device)

    def set(self, runs: Runs, places: Mapping[int, Place]) -> None:
        """Let the kernels that are queued from now on see a step.

        Args:
            runs: its tokens.
            places: of its adapters, by id; none if it has no adapted token.
        """
        self._counts[:] = 0
        if not places:
            return
        found = cut(runs, places, block_rows(int(runs.counts.sum()), self._max_rank, is_invariant()))
        self._counts[[ADAPTED, ALL]] = found.adapted, len(found.blocks)
        self._counts[LINEAR] = any(place.linear for place in places.values())
        self._counts[STREAMS] = any(place.streams for place in places.values())
        header = np.array([[found.adapted, len(found.blocks), 0, 0]], dtype=np.int32)
        _copy(self.blocks, np.concatenate([header, found.blocks]))
        _copy(self.tokens, found.tokens)

    def arguments(self) -> list[torch.Tensor]:
        """For the ops."""
        return [self.counts, self.blocks, self.tokens]


def _copy(target: torch.Tensor, source: Any) -> None:
    """Queue a copy of `source` to the beginning of `target`; torch keeps the pinned memory until it has been read."""
    host = torch.from_numpy(source)
    target[: len(host)].copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


class PoolPunicaWrapper(PunicaWrapperGPU):  # type: ignore[misc]
    """Upstream's interface; linear layers hand over the pool instead of their own weights."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self.step = Step(max_num_batched_tokens, self.lora_config.max_loras, self.lora_config.max_lora_rank, device)

    def begin_step(self, runs: Runs, places: Mapping[int, Place]) -> None:
        """See `Step.set`."""
        self.step.set(runs, places)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """`y[token, slice] += scale of its adapter * (x[token] @ A.T) @ B.T`; torch.compile traces this.

        Args:
            y: `[num_tokens, sum(output_slices)]`, or with a leading dimension of 1; changed in place.
            x: `[num_tokens, in_features]`, or with a leading dimension of 1.
            lora_a_stacked: `(pool,)`; empty for a layer that no adapter can adapt.
            lora_b_stacked: `(table, slices)`, of this layer.
            scale: 1, as upstream's layers have it; each adapter's own scale is in the table.
            output_slices: the slices' widths, in order.
        """
        if not lora_a_stacked:
            return
        assert scale == 1.0
        assert buffer is None
        (pool,) = lora_a_stacked
        table, slices = lora_b_stacked
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        alignment = common_alignment(*output_slices)
        add_lora(y, x, pool, table, slices, *self._step(), max(output_slices), alignment)

    def add_lora_silu_and_mul(
        self,
        gate_up: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """`silu(gate) * up`, `[num_tokens, width]`, of what `add_lora_linear` would leave in gate_up; torch.compile traces this.

        Args:
            gate_up: `[num_tokens, 2 * width]`, of the base model's layer.
            x: `[num_tokens, in_features]`, its input.
            lora_a_stacked: as of a linear layer that some adapter can adapt.
            lora_b_stacked: as of a linear layer with two slices.
        """
        (pool,) = lora_a_stacked
        table, slices = lora_b_stacked
        hidden: torch.Tensor = add_lora_silu_and_mul(gate_up, x, pool, table, slices, *self._step())
        return hidden

    def add_intervention(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
    ) -> None:
        """`hidden[token] += (h[token] @ W1.T + b) @ W2`, where h is `hidden + residual`; torch.compile traces this.

        Args:
            hidden: `[num_tokens, width]`, changed in place.
            residual: `[num_tokens, width]`.
            lora_a_stacked: as of a linear layer.
            lora_b_stacked: as of a linear layer with one slice.
        """
        if not lora_a_stacked:
            return
        (pool,) = lora_a_stacked
        table, slices = lora_b_stacked
        add_intervention(hidden, residual, pool, table, slices, *self._step())

    def _step(self) -> tuple[list[torch.Tensor], int, int]:
        return self.step.arguments(), self.lora_config.max_loras, self.lora_config.max_lora_rank


def patch() -> None:
    """Let the CUDA platform choose this class."""
    from vllm.platforms.cuda import CudaPlatformBase

    from engine_patch.patching import put

    name = f"{PoolPunicaWrapper.__module__}.{PoolPunicaWrapper.__qualname__}"
    put(CudaPlatformBase, "get_punica_wrapper", classmethod(lambda cls: name))
