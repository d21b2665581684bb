"""LoRA pairs to an adapter's run of pages and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine_patch.adapter import LoraPair
from engine_patch.store.layout import Block, PageLayout


@torch.no_grad()
def pack(loras: Mapping[str, LoraPair], layout: PageLayout) -> torch.Tensor:
    """`pages` [num_pages, page_elements] in the adapter's own dtype; what no weight fills is zero."""
    dtype = next(iter(loras.values())).a.dtype
    run = torch.zeros(layout.num_pages * layout.page_elements, dtype=dtype)
    for name, block in layout.blocks.items():
        a, b = views(run, block)
        a.copy_(loras[name].a)
        b.copy_(loras[name].b.t())
    return run.view(layout.num_pages, layout.page_elements)


def unpack(pages: torch.Tensor, layout: PageLayout) -> dict[str, LoraPair]:
    """The inverse of `pack`; tensors own their memory."""
    loras = {}
    for name, block in layout.blocks.items():
        a, b = views(pages.view(-1), block)
        loras[name] = LoraPair(a.clone(), b.t().contiguous(), block.module.scaling)
    return loras


def views(run: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in_features] and B transposed [rank, out_features] of one module in `run` [num_elements]."""
    m = block.module
    a = run[block.a_offset : block.a_offset + m.rank * m.in_features].view(m.rank, m.in_features)
    b = run[block.b_offset : block.b_offset + m.rank * m.out_features].view(m.rank, m.out_features)
    return a, b
