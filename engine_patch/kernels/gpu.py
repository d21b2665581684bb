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
from vllm import envs
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from engine_patch.kernels.layer import Layer, Shared, Weights
from engine_patch.kernels.op import add_intervention, add_lora, add_lora_silu_and_mul
from engine_patch.kernels.step import Place, Runs, cut
from engine_patch.kernels.tiles import block_rows


def set_step(shared: Shared, runs: Runs, places: Mapping[int, Place]) -> None:
    """Let the kernels that are queued from now on see a step.

    Args:
        shared: of the engine.
        runs: the step's tokens.
        places: of its adapters, by id; none if it has no adapted token.
    """
    shared.linear = any(place.linear for place in places.values())
    shared.streams = any(place.streams for place in places.values())
    if not places:
        return
    found = cut(runs, places, block_rows(int(runs.counts.sum()), shared.max_rank, shared.is_invariant))
    shared.num_adapted, shared.num_blocks = found.adapted, len(found.blocks)
    header = np.array([[found.adapted, len(found.blocks), 0, 0]], dtype=np.int32)
    _copy(shared.blocks, np.concatenate([header, found.blocks]))
    _copy(shared.tokens, found.tokens)


def _copy(target: torch.Tensor, source: Any) -> None:
    """Queue a copy of `source` to the beginning of `target`; torch keeps the pinned memory until it has been read."""
    host = torch.from_numpy(source)
    target[: len(host)].copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


class PoolPunicaWrapper(PunicaWrapperGPU):  # type: ignore[misc]
    """Upstream's interface; linear layers hand over the key of a `Layer` instead of their own weights."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        adapters, rank = self.lora_config.max_loras, self.lora_config.max_lora_rank
        self.shared = Shared(max_num_batched_tokens, adapters, rank, bool(envs.VLLM_BATCH_INVARIANT), device)
        self.layers: list[Layer] = []

    def adopt(self, pool: torch.Tensor, table: torch.Tensor, slices: torch.Tensor) -> tuple[Any, Any]:
        """What a layer is to hand over as `lora_a_stacked` and `lora_b_stacked`.

        Args:
            pool: `[num_elements]`.
            table: int64 `[kinds, n_slices, 4]`, of this layer.
            slices: int32 `[n_slices, 2]`.
        """
        self.layers.append(Layer(Weights(pool, table, slices), self.shared))
        return (self.layers[-1].key,), ()

    def begin_step(self, runs: Runs, places: Mapping[int, Place]) -> None:
        """See `set_step`."""
        set_step(self.shared, runs, places)

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
            lora_a_stacked: what `adopt` gave; empty for a layer that no adapter can adapt.
            lora_b_stacked: empty.
            scale: 1, as upstream's layers have it; each adapter's own scale is in the table.
            output_slices: the slices' widths, in order.
        """
        if not lora_a_stacked:
            return
        assert scale == 1.0
        assert buffer is None
        add_lora(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), lora_a_stacked[0])

    def add_lora_silu_and_mul(
        self, gate_up: torch.Tensor, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """`silu(gate) * up`, `[num_tokens, width]`, of what `add_lora_linear` would leave in gate_up; torch.compile traces this.

        Args:
            gate_up: `[num_tokens, 2 * width]`, of the base model's layer.
            x: `[num_tokens, in_features]`, its input.
            lora_a_stacked: of a linear layer with two slices that some adapter can adapt.
        """
        hidden: torch.Tensor = add_lora_silu_and_mul(gate_up, x, lora_a_stacked[0])
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
            lora_b_stacked: empty.
        """
        if lora_a_stacked:
            add_intervention(hidden, residual, lora_a_stacked[0])


def patch() -> None:
    """Let the CUDA platform choose this class."""
    from vllm.platforms.cuda import CudaPlatformBase

    from engine_patch.patching import put

    name = f"{PoolPunicaWrapper.__module__}.{PoolPunicaWrapper.__qualname__}"
    put(CudaPlatformBase, "get_punica_wrapper", classmethod(lambda cls: name))
