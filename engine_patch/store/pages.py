"""Low-rank pairs to an adapter's run of pages and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from engine_patch.adapter import LowRankPair
from engine_patch.store.layout import Block, PageLayout


class Views(NamedTuple):
    """One module's tensors in a run of pages."""

    a: torch.Tensor
    """[rank, in_features]"""
    b: torch.Tensor
    """B transposed, [rank, out_features]"""
    bias: torch.Tensor | None
    """[rank]"""


@torch.no_grad()
def pack(pairs: Mapping[str, LowRankPair], layout: PageLayout) -> torch.Tensor:
    """`pages` [num_pages, page_elements] in the adapter's own dtype; what no weight fills is zero."""
    dtype = next(iter(pairs.values())).a.dtype
    run = torch.zeros(layout.num_pages * layout.page_elements, dtype=dtype)
    for name, block in layout.blocks.items():
        place, pair = views(run, block), pairs[name]
        place.a.copy_(pair.a)
        place.b.copy_(pair.b.t())
        if place.bias is not None and pair.bias is not None:
            place.bias.copy_(pair.bias)
    return run.view(layout.num_pages, layout.page_elements)


def unpack(pages: torch.Tensor, layout: PageLayout) -> dict[str, LowRankPair]:
    """The inverse of `pack`; tensors own their memory."""
    pairs = {}
    for name, block in layout.blocks.items():
        a, b, bias = views(pages.view(-1), block)
        bias = None if bias is None else bias.clone()
        pairs[name] = LowRankPair(a.clone(), b.t().contiguous(), block.module.scaling, bias)
    return pairs


def views(run: torch.Tensor, block: Block) -> Views:
    """The tensors of one module in `run` [num_elements]."""
    m, start = block.module, block.a_offset
    end = start + m.rank * m.in_features
    b = run[block.b_offset : block.b_offset + m.rank * m.out_features].view(m.rank, m.out_features)
    return Views(run[start:end].view(m.rank, m.in_features), b, run[end : end + m.rank] if m.bias else None)
