"""Adapters on CUDA GPUs from one pool of them, in place of an array of slots for each layer.

Only a CUDA engine imports this module.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from engine_patch.kernels.op import add_intervention, add_lora
from engine_patch.kernels.tiles import common_alignment


class PoolPunicaWrapper(PunicaWrapperGPU):  # type: ignore[misc]
    """Upstream's interface and metadata; linear layers hand over the pool instead of their own weights."""

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
        add_lora(
            y,
            x,
            pool,
            table,
            slices,
            self._metadata(x.size(0)),
            self.lora_config.max_lora_rank,
            max(output_slices),
            common_alignment(*output_slices),
        )

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
        metadata = self._metadata(hidden.size(0))
        add_intervention(hidden, residual, pool, table, slices, metadata, self.lora_config.max_lora_rank)

    def _metadata(self, num_tokens: int) -> list[torch.Tensor]:
        """Upstream's, of the step's tokens."""
        return list(self.token_mapping_meta.meta_args(num_tokens, self.lora_config.specialize_active_lora))


def patch() -> None:
    """Let the CUDA platform choose this class."""
    from vllm.platforms.cuda import CudaPlatformBase

    from engine_patch.patching import put

    name = f"{PoolPunicaWrapper.__module__}.{PoolPunicaWrapper.__qualname__}"
    put(CudaPlatformBase, "get_punica_wrapper", classmethod(lambda cls: name))
