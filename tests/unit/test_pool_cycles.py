"""The tiers over many load and evict cycles: never above their limits, and memory does not grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.base_model import BaseFingerprint
from engine_patch.pool.share import Sharer
from engine_patch.store.layout import PAGE_BYTES
from tests.benchmarks import pool_cycles
from tests.benchmarks.material import Shape

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
    assert cycles(tmp_path, 200).growth()["rss"] > 2 * GROWTH_BYTES
