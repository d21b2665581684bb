"""Tiers without an engine: a model of two fused layers and two plain ones, and adapters for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.kernels.step import Place
from engine_patch.pool.layers import EngineLayers, Slice
from engine_patch.pool.limits import Limits
from engine_patch.pool.tiers import AdapterTiers
from engine_patch.ref import AdapterRef
from engine_patch.store.file import write_adapter
from engine_patch.store.layout import PAGE_BYTES

BASE = BaseFingerprint(hidden_size=64)
SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in (0, 1)
    for name, shape in {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (64, 32),
        "self_attn.v_proj": (64, 32),
        "mlp.down_proj": (96, 64),
    }.items()
}


def layers(shapes: Mapping[str, tuple[int, int]] = SHAPES) -> EngineLayers:
    """An engine's layers on one device; the wrapped layers themselves are not needed."""
    slices = [Slice(name, *shape, None, None) for name, shape in shapes.items()]
    return EngineLayers([(None, [part]) for part in slices], BASE)


def limits(made: EngineLayers, device_pages: int, host_pages: int, max_rank: int = 64, itemsize: int = 4) -> Limits:
    return Limits(
        base=BASE.to_dict(),
        max_rank=max_rank,
        modules=made.sizes(),
        itemsize=itemsize,
        device_bytes=device_pages * PAGE_BYTES,
        host_bytes=host_pages * PAGE_BYTES,
    )


def tiers(device_pages: int, host_pages: int, slots: int = 2, dtype: torch.dtype = torch.float32) -> AdapterTiers:
    made = layers()
    return AdapterTiers(
        made, limits(made, device_pages, host_pages, itemsize=dtype.itemsize), slots, dtype, torch.device("cpu")
    )


def random_adapter(
    seed: int, rank: int = 4, method: str = "lorap", modules: tuple[str, ...] = tuple(SHAPES)
) -> Adapter:
    torch.manual_seed(seed)
    pairs = {}
    for name in modules:
        size_in, size_out = SHAPES[name]
        pairs[name] = LowRankPair(torch.randn(rank, size_in), torch.randn(size_out, rank), 0.5)
    return Adapter(method, BASE, pairs)


def write(folder: Path, name: str, adapter: Adapter) -> AdapterRef:
    """The adapter in a file, and how requests name it."""
    path = folder / f"{name}.preft"
    header = write_adapter(path, adapter)
    return AdapterRef(path, header.method, header.digest)


def on_device(found: AdapterTiers, place: Place) -> dict[str, LowRankPair]:
    """What the kernels would compute with: the weights that the table's rows point at from this place on."""
    from engine_patch.kernels.reference import bits_to_scale

    pairs = {}
    pool = found.device.pool[place.page * PAGE_BYTES // found.device.pool.element_size() :]
    for name, (a, b, rank, bits) in zip(SHAPES, found.device.table[place.kind].tolist(), strict=True):
        size_in, size_out = SHAPES[name]
        if rank:
            left = pool[a : a + rank * size_in].view(rank, size_in)
            right = pool[b : b + rank * size_out].view(rank, size_out).t()
            pairs[name] = LowRankPair(left.clone(), right.clone(), bits_to_scale(bits))
    return pairs
