"""One layer of an engine, as its custom ops know it: by a number.

Whatever an op is given besides costs every call some microseconds, and a step has a hundred calls. The number comes in a
tensor, so that the compiled code of all layers is the same.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch

from engine_patch.kernels.tiles import (
    RANK_UNIT,
    Tiles,
    block_rows,
    choose_splits,
    choose_tiles,
    common_alignment,
    most_blocks,
)
from engine_patch.store.layout import PAGE_BYTES

LAYERS: WeakValueDictionary[int, Layer] = WeakValueDictionary()
"""By number; of engines that are alive."""

_numbers = count()


class Weights(NamedTuple):
    """The adapters of one layer."""

    pool: torch.Tensor
    """`[num_elements]`."""
    table: torch.Tensor
    """int64 `[kinds, n_slices, 4]`, a view with strides."""
    slices: torch.Tensor
    """int32 `[n_slices, 2]`: first column and width."""


class Shared:
    """What all layers of an engine share: the step. Its tensors stay, since graphs hold them."""

    def __init__(
        self, max_tokens: int, max_adapters: int, max_rank: int, is_invariant: bool, device: torch.device | str
    ) -> None:
        self.max_tokens, self.max_adapters, self.max_rank, self.is_invariant = (
            max_tokens,
            max_adapters,
            max_rank,
            is_invariant,
        )
        self.num_adapted = self.num_blocks = 0
        """Blocks of the step with an adapter, and all."""
        self.linear = self.streams = False
        """Whether any adapter of the step has a part for these."""
        most = most_blocks(max_tokens, max_adapters, max_rank, is_invariant)
        self.blocks = torch.zeros(1 + most, 4, dtype=torch.int32, device=device)
        """`num_adapted`, `num_blocks` and two zeros; then `step.Blocks.blocks`."""
        self.tokens = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        """`step.Blocks.tokens`."""
        self.padded_rank = -(-max_rank // RANK_UNIT) * RANK_UNIT

    def launched(self, num_tokens: int, only_adapted: bool) -> int:
        """Blocks to launch programs for; those that the step does not have end at once."""
        if self.blocks.is_cuda and torch.cuda.is_current_stream_capturing():
            # A graph is replayed for other steps of its size.
            return most_blocks(num_tokens, self.max_adapters, self.max_rank, self.is_invariant)
        return self.num_adapted if only_adapted else self.num_blocks


class Layer:
    """One fused linear layer, or one residual stream."""

    def __init__(self, weights: Weights, shared: Shared) -> None:
        assert weights.table.stride()[1:] == (4, 1)
        assert weights.slices.is_contiguous()
        self.pool, self.table, self.slices = weights
        self.shared = shared
        self.kind_stride, self.page = self.table.stride(0), PAGE_BYTES // self.pool.element_size()
        self.n_slices, widths = self.slices.size(0), self.slices[:, 1].tolist()
        self.max_width, self.alignment = max(widths), common_alignment(*widths)
        self.padded_rank = shared.padded_rank
        rank, is_float32, is_invariant = shared.max_rank, self.pool.dtype == torch.float32, shared.is_invariant
        self._tiles = {
            rows: choose_tiles(rows, rank, is_float32)
            for rows in {block_rows(1, rank, is_invariant), block_rows(shared.max_tokens, rank, is_invariant)}
        }
        self.number = next(_numbers)
        self.key = torch.tensor([self.number], device="cpu")
        """What ops are given."""
        LAYERS[self.number] = self

    def tiles(self, num_tokens: int) -> Tiles:
        """For a step of `num_tokens` tokens, all of them with their padding."""
        return self._tiles[block_rows(num_tokens, self.shared.max_rank, self.shared.is_invariant)]

    def splits(self, num_tokens: int, in_features: int, rows: int) -> int:
        """Among how many programs shrink shares a sum. One with batch invariance: no token's result depends on its company."""
        if self.shared.is_invariant:
            return 1
        return choose_splits(max(1, num_tokens // rows) * self.n_slices, in_features)
