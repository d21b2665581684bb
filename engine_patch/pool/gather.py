"""The weights of an adapter in a trainer's memory to a run of pages, in a handful of kernels.

`pack` makes two copies for each of an adapter's modules: 420 for LoRAs on all linear layers of 30, each a kernel on a GPU.
Where every element goes depends on shapes alone. So `pack` is asked once, with the elements' positions for weights, and what it
makes of them is the index by which one kernel takes all elements to their places: pages in order, B transposed, zeros between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch

from engine_patch.adapter import LowRankPair
from engine_patch.store.layout import PageLayout
from engine_patch.store.pages import pack

ZEROS = 16
"""Elements before the first weight; `pack` leaves 0 where no weight goes, and at position 0 lies a zero."""


class Gather:
    """Of all adapters whose tensors have the shapes and the order in memory of those that it is made with.

    It keeps an index of 4 bytes an element on the engine's device.
    """

    def __init__(self, pairs: Mapping[str, LowRankPair], layout: PageLayout, device: torch.device) -> None:
        """Look at `pairs` once.

        Args:
            pairs: by module name, all modules of the layout.
            layout: of the pages.
            device: of the pages.
        """
        self._names, self._device = list(layout.blocks), device
        tensors = [tensor for name in self._names for tensor in pairs[name].tensors.values()]
        ends = list(itertools.accumulate((tensor.numel() for tensor in tensors), initial=ZEROS))
        dtype = torch.int32 if ends[-1] < 1 << 31 else torch.int64
        starts = iter(ends)

        def positions(tensor: torch.Tensor) -> torch.Tensor:
            start = next(starts)
            return in_shape(torch.arange(start, start + tensor.numel(), dtype=dtype), tensor)

        places = {}
        for name in self._names:
            a, b = positions(pairs[name].a), positions(pairs[name].b)
            bias = pairs[name].bias
            places[name] = LowRankPair(a, b, pairs[name].scaling, None if bias is None else positions(bias))
        self._index = pack(places, layout).view(-1).to(device)

    @torch.no_grad()
    def __call__(self, pairs: Mapping[str, LowRankPair]) -> torch.Tensor:
        """The run of pages, `[num_elements]`, of the weights' dtype on the engine's device."""
        tensors = list(flat(pairs[name] for name in self._names))
        if len({tensor.device for tensor in tensors}) > 1:
            tensors = [tensor.to(self._device) for tensor in tensors]
        zeros = torch.zeros(ZEROS, dtype=tensors[0].dtype, device=tensors[0].device)
        return torch.cat([zeros, *tensors]).to(self._device).index_select(0, self._index)


def flat(pairs: Iterator[LowRankPair]) -> Iterator[torch.Tensor]:
    """All elements, `[numel]` for each tensor, in the order in which they lie: nothing is copied if there are no gaps."""
    for pair in pairs:
        for tensor in (pair.a, pair.b, pair.bias):
            if tensor is not None:
                yield (tensor.t() if is_transposed(tensor) else tensor).reshape(-1)


def is_transposed(tensor: torch.Tensor) -> bool:
    """Whether it is a matrix that lies column by column."""
    return tensor.dim() == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()


def in_shape(elements: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `flat` for one tensor."""
    return elements.view(like.shape[::-1]).t() if is_transposed(like) else elements.view(like.shape)
