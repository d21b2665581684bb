"""The tiers over many load and evict cycles: never above their limits, and memory does not grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.base_model import BaseFingerprint
from engine_patch.pool.share import Sharer
from engine_patch.pool.tiers import AdapterTiers, parse
from engine_patch.store.layout import PAGE_BYTES
from tests.benchmarks import pool_cycles
from tests.benchmarks.material import Shape, random_adapter, write_ref

HIDDEN, WIDE, LAYERS = 256, 512, 4
GROWTH_BYTES = 24 << 20
"""Some 250 MB are loaded after the first 100 cycles: less than a tenth of them may stay."""

ATTENTION = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN, 64), "v_proj": (HIDDEN, 64), "o_proj": (HIDDEN, HIDDEN)}
MLP = {"gate_proj": (HIDDEN, WIDE), "up_proj": (HIDDEN, WIDE), "down_proj": (WIDE, HIDDEN)}
MODULES = {
    f"model.layers.{layer}.{part}.{name}": size
    for layer in range(LAYERS)
    for part, sizes in (("self_attn", ATTENTION), ("mlp", MLP))
    for name, size in sizes.items()
}
SHAPE = Shape("small", None, BaseFingerprint(hidden_size=HIDDEN), MODULES)


def cycles(folder: Path, count: int) -> pool_cycles.Cycles:
    made = pool_cycles.make(SHAPE, folder, copies=2)
    tiers = pool_cycles.tiers_for(SHAPE, made, torch.device("cpu"))
    return pool_cycles.run(tiers, made, count)


def test_200_cycles_stay_within_the_pools_and_do_not_grow(tmp_path: Path) -> None:
    found = cycles(tmp_path, 200)
    assert found.violations == []
    assert found.growth()["rss"] < GROWTH_BYTES
    for tier in ("host", "device"):  # else nothing was put to the test
        assert found.counters[tier]["evictions"] > 100
    kinds = len(pool_cycles.SUBSETS) * len(pool_cycles.RANKS) + 2
    assert len(found.waste) == kinds + 2
    assert all(1 <= waste < 1 + PAGE_BYTES / 30_000 for waste in found.waste.values())  # the smallest has 30 kB


def test_a_leak_of_what_is_loaded_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def leaky(self: Any, path: Path, header: Any, into: torch.Tensor, each: Any) -> None:
        load(self, path, header, into, each)
        kept.append(into.clone())

    load = Sharer.load
    monkeypatch.setattr(Sharer, "load", leaky)
    assert cycles(tmp_path, 200).growth()["rss"] > GROWTH_BYTES


def test_what_is_said_to_have_arrived_is_not_evicted_for_what_comes_before_it(tmp_path: Path) -> None:
    """`first` is the device's least recently used and in no other pool, when `new` needs room: something else has to go."""
    names = ("first", "second", "third", "new")
    adapters = [random_adapter(SHAPE.base, SHAPE.modules, 8, seed) for seed in range(len(names))]
    refs = {
        name: write_ref(tmp_path / f"{name}.preft", one).encode() for name, one in zip(names, adapters, strict=True)
    }
    size = SHAPE.limits(8, torch.bfloat16, 1 << 62, 1 << 62).largest_pages() * PAGE_BYTES
    limits = SHAPE.limits(8, torch.bfloat16, device_bytes=3 * size, host_bytes=2 * size)
    tiers = AdapterTiers(SHAPE.layers(), limits, 2, torch.bfloat16, torch.device("cpu"))
    for name in names[:3]:
        tiers.activate([refs[name]])
    digests = [parse(refs[name]).digest for name in ("new", "first")]
    while tiers.want([], [refs["new"], refs["first"]], patience=1.0):
        pass
    assert all(digest in tiers.device.adapters for digest in digests)
