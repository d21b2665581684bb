"""Where each weight lies in an adapter's pages. No torch here.

An adapter is one run of bytes, in the order in which the engine computes: layer after layer, and in each layer its fused linear
layers (q, k and v are one in the engine; so are gate and up). A fused layer's part is

    A of each of its modules    [rank, in_features]
    B of each of its modules    [rank, out_features]   (transposed, so that each rank's column is contiguous)

The residual stream after a layer is like a layer of its own that follows, with W1 for A and W2 for B; right behind W1 lies its
bias, [rank].

Each module has its own rank, so nothing is padded to the largest, and what is not adapted takes no room. The run ends on a page
boundary: pages are the unit in which the pools give out memory. Scalings stand beside the tensors and are not folded into them:
folding would round once more, and the kernels apply them in float32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine_patch import residual

PAGE_BYTES = 4096
"""The unit of files and pools, and the alignment of the pages in a file."""

ALIGNMENT = 16
"""Elements: every tensor starts where the widest vector loads may begin."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), (residual.SUFFIX,))
"""The engine's fused linear layers, in the order of a decoder layer's computation; the residual stream comes last."""

_PLACE = {name: (group, index) for group, names in enumerate(FUSED) for index, name in enumerate(names)}

# The first numbered segment is the decoder layer; later ones (an expert's number) belong to the module.
_LAYER = re.compile(r"(.*?\.\d+)\.(.+)")


@dataclass(frozen=True)
class ModuleLayout:
    """One adapted linear layer, or residual stream."""

    rank: int
    in_features: int
    out_features: int
    scaling: float
    bias: bool = False
    """Whether a bias lies behind A."""

    @property
    def a_elements(self) -> int:
        """Of A, with the bias behind it."""
        return self.rank * (self.in_features + self.bias)


@dataclass(frozen=True)
class Block:
    """One module's tensors in the run; offsets are in elements."""

    a_offset: int
    b_offset: int
    module: ModuleLayout


@dataclass(frozen=True)
class PageLayout:
    """Every weight's place in an adapter's run."""

    blocks: dict[str, Block]
    """By module name, in the order in which they lie."""
    num_pages: int
    page_elements: int


def split_module(name: str) -> tuple[str, str]:
    """`model.layers.3.mlp.up_proj` -> (`model.layers.3`, `mlp.up_proj`); a name without a layer has layer ``""``."""
    match = _LAYER.fullmatch(name)
    return (match[1], match[2]) if match else ("", name)


def join_module(layer: str, suffix: str) -> str:
    """The inverse of `split_module`."""
    return f"{layer}.{suffix}" if layer else suffix


def plan_pages(modules: Mapping[str, ModuleLayout], itemsize: int) -> PageLayout:
    """The layout of an adapter with these modules, whose elements have `itemsize` bytes.

    It depends on their names and shapes only, not on their order.
    """
    fused: dict[tuple[object, ...], list[str]] = {}
    for name in sorted(modules, key=_order):
        fused.setdefault(_order(name)[:-1], []).append(name)
    a_offsets, b_offsets, end = {}, {}, 0
    for names in fused.values():
        for name in names:
            a_offsets[name], end = end, _aligned(end + modules[name].a_elements)
        for name in names:
            b_offsets[name], end = end, _aligned(end + modules[name].rank * modules[name].out_features)
    blocks = {
        name: Block(a_offsets[name], b_offsets[name], modules[name]) for names in fused.values() for name in names
    }
    page_elements = PAGE_BYTES // itemsize
    return PageLayout(blocks, -(-end // page_elements), page_elements)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _order(name: str) -> tuple[str, int, int, str, int]:
    """Layers by number, then fused layers, then their modules. Modules that the engine does not fuse come last, by name."""
    layer, suffix = split_module(name)
    stem, _, number = layer.rpartition(".")
    parent, _, own = suffix.rpartition(".")
    group, index = _PLACE.get(own, (len(FUSED), 0))
    return (stem, int(number) if number.isdigit() else -1, group, parent if own in _PLACE else suffix, index)
