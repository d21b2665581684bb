"""LoRA pairs to pages and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine_patch.adapter import LoraPair
from engine_patch.store.layout import GRANULE, ModuleLayout, PageLayout, join_module


@torch.no_grad()
def pack(loras: Mapping[str, LoraPair], layout: PageLayout) -> torch.Tensor:
    """`pages` [num_pages, page_elements] in the adapter's own dtype; what no weight fills is zero."""
    dtype = next(iter(loras.values())).a.dtype
    pages = torch.zeros(layout.num_pages, layout.page_elements, dtype=dtype)
    for layer in layout.layers:
        block = pages[layer.first_page : layer.first_page + layer.num_pages]
        for suffix, slot in layout.slots.items():
            pair = loras.get(join_module(layer.layer, suffix))
            if pair is not None:
                _put(block, slot.a_offset, pair.a)
                _put(block, slot.b_offset, pair.b.t())
    return pages


def unpack(pages: torch.Tensor, layout: PageLayout, modules: Mapping[str, ModuleLayout]) -> dict[str, LoraPair]:
    """The inverse of `pack`; tensors own their memory."""
    loras = {}
    for layer in layout.layers:
        block = pages[layer.first_page : layer.first_page + layer.num_pages]
        for suffix, slot in layout.slots.items():
            name = join_module(layer.layer, suffix)
            module = modules.get(name)
            if module is not None:
                a = _take(block, slot.a_offset, module.rank, module.in_features)
                b_t = _take(block, slot.b_offset, module.rank, module.out_features)
                loras[name] = LoraPair(a.clone(), b_t.t().contiguous(), module.scaling)
    return loras


def _put(block: torch.Tensor, offset: int, rows: torch.Tensor) -> None:
    """Write `rows` [rank, width] into a layer's pages `block` [granules, page_elements], 8 ranks a page."""
    rank, width = rows.shape
    for page, start in enumerate(range(0, rank, GRANULE)):
        part = rows[start : start + GRANULE]
        block[page, offset : offset + part.numel()].view(-1, width).copy_(part)


def _take(block: torch.Tensor, offset: int, rank: int, width: int) -> torch.Tensor:
    """Read [rank, width] back from a layer's pages `block` [granules, page_elements]."""
    rows = block[:, offset : offset + GRANULE * width].reshape(-1, width)
    return rows[:rank]
