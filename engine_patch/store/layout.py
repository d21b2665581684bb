"""Where each weight lies in an adapter's pages. No torch here.

A page is one layer's share of one granule of 8 ranks, for the adapter's whole set of target modules. An adapter of
rank r takes `layers x ceil(r / 8)` pages of one size, one layer after the other. Inside a page, module after module:

    A rows of the granule   [8, in_features]
    B columns of it         [8, out_features]   (B transposed, so that each rank's column is contiguous)

Ranks beyond a module's own, and modules that a layer does not adapt, are zeros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

GRANULE = 8
"""Ranks a page."""

# The first numbered segment is the decoder layer; later ones (an expert's number) belong to the module.
_LAYER = re.compile(r"(.*?\.\d+)\.(.+)")


@dataclass(frozen=True)
class ModuleLayout:
    """One adapted linear layer."""

    rank: int
    in_features: int
    out_features: int
    scaling: float


@dataclass(frozen=True)
class Slot:
    """One target module's place in each page; offsets are in elements."""

    a_offset: int
    b_offset: int


@dataclass(frozen=True)
class LayerPages:
    """The pages of one decoder layer."""

    layer: str
    first_page: int
    num_pages: int


@dataclass(frozen=True)
class PageLayout:
    """Every weight's place in `pages` [num_pages, page_elements]."""

    slots: dict[str, Slot]
    """By module suffix, such as `self_attn.q_proj`."""
    layers: tuple[LayerPages, ...]
    num_pages: int
    page_elements: int


def split_module(name: str) -> tuple[str, str]:
    """`model.layers.3.mlp.up_proj` -> (`model.layers.3`, `mlp.up_proj`); a name without a layer has layer ``""``."""
    match = _LAYER.fullmatch(name)
    return (match[1], match[2]) if match else ("", name)


def join_module(layer: str, suffix: str) -> str:
    """The inverse of `split_module`."""
    return f"{layer}.{suffix}" if layer else suffix


def plan_pages(modules: Mapping[str, ModuleLayout]) -> PageLayout:
    """The page layout of an adapter with these modules; depends on their names and shapes only, not on their order."""
    widths: dict[str, tuple[int, int]] = {}
    ranks: dict[str, int] = {}
    for name, module in modules.items():
        layer, suffix = split_module(name)
        in_features, out_features = widths.get(suffix, (0, 0))
        widths[suffix] = (max(in_features, module.in_features), max(out_features, module.out_features))
        ranks[layer] = max(ranks.get(layer, 0), module.rank)

    slots, offset = {}, 0
    for suffix in sorted(widths):
        in_features, out_features = widths[suffix]
        slots[suffix] = Slot(a_offset=offset, b_offset=offset + GRANULE * in_features)
        offset += GRANULE * (in_features + out_features)

    layers, page = [], 0
    for layer in sorted(ranks, key=_by_number):
        count = -(-ranks[layer] // GRANULE)
        layers.append(LayerPages(layer, page, count))
        page += count
    return PageLayout(slots, tuple(layers), page, offset)


def _by_number(layer: str) -> tuple[str, int]:
    stem, _, number = layer.rpartition(".")
    return (stem, int(number)) if number.isdigit() else (layer, -1)
