"""Load and evict cycles through `AdapterTiers` on adapters of many kinds, with memory watched from outside."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine_patch.adapter import Adapter
from engine_patch.pool.tiers import AdapterTiers
from engine_patch.ref import AdapterRef
from engine_patch.store.file import read_header
from engine_patch.store.layout import PAGE_BYTES
from tests.benchmarks.common import synchronise
from tests.benchmarks.material import Shape, random_adapter, weight_bytes, write_ref

RANKS = (4, 8, 12, 64)
SUBSETS = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "q and v": ("q_proj", "v_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
SLOTS = 4
HOST_SHARE, DEVICE_SHARE = 1 / 3, 1 / 6
"""Of the bytes of all adapters together: both pools are too small on purpose."""

SETTLED = 100
"""Cycles after which memory must not grow: pools, thread stacks and the allocator's own stores are in use by then."""

SAMPLE_EVERY = 20
STUCK_S = 60.0


@dataclass(frozen=True)
class Made:
    """An adapter's file."""

    kind: str
    ref: AdapterRef
    weight_bytes: int
    """Of A and B of each module at its own rank, in the engine's dtype."""


@dataclass
class Cycles:
    """What a run has seen."""

    samples: list[dict[str, int]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    """Of the pools' limits."""
    counters: dict[str, Any] = field(default_factory=dict)
    waste: dict[str, float] = field(default_factory=dict)
    """Bytes in a pool over bytes of weights, by kind; `in the host pool`, `on the device`: of what was there at the end."""

    def growth(self) -> dict[str, int]:
        """The largest growth of each memory figure since cycle `SETTLED`."""
        settled = next(sample for sample in self.samples if sample["cycle"] >= SETTLED)
        later = [sample for sample in self.samples if sample["cycle"] >= SETTLED]
        return {
            name: max(sample[name] - start for sample in later) for name, start in settled.items() if name != "cycle"
        }


def make(shape: Shape, folder: Path, copies: int) -> list[Made]:
    """`copies` adapters of each kind: ranks and subsets, ranks that differ from module to module, a file in float32."""
    return [
        Made(
            kind, write_ref(folder / f"{kind}-{copy}.preft".replace(" ", "-"), adapter), weight_bytes(adapter) // shrink
        )
        for copy in range(copies)
        for kind, adapter, shrink in _adapters(shape, seed=copy * 100)
    ]


def _adapters(shape: Shape, seed: int) -> Iterator[tuple[str, Adapter, int]]:
    """Kind, adapter, and by how much its weights shrink from the file to the engine's dtype."""
    for index, (subset, names) in enumerate(SUBSETS.items()):
        modules = {name: size for name, size in shape.modules.items() if name.endswith(names)}
        for rank in RANKS:
            yield f"{subset} {rank}", random_adapter(shape.base, modules, rank, seed + index * 10 + rank), 1
    mixed = {name: RANKS[index % len(RANKS)] for index, name in enumerate(shape.modules)}
    yield "all mixed", random_adapter(shape.base, shape.modules, mixed, seed + 90), 1
    yield "all 8 float32", random_adapter(shape.base, shape.modules, 8, seed + 91, "float32"), 2


def tiers_for(shape: Shape, made: list[Made], device: torch.device) -> AdapterTiers:
    """Tiers of a bfloat16 engine that hold a part of all adapters."""
    total = sum(one.weight_bytes for one in made)
    least = shape.limits(max(RANKS), torch.bfloat16, 1 << 62, 1 << 62).largest_pages() * PAGE_BYTES
    sizes = [max(int(total * share), least) for share in (DEVICE_SHARE, HOST_SHARE)]
    return AdapterTiers(shape.layers(), shape.limits(max(RANKS), torch.bfloat16, *sizes), SLOTS, torch.bfloat16, device)


def run(tiers: AdapterTiers, made: list[Made], cycles: int, seed: int = 0) -> Cycles:
    """Steps with random adapters, as the engine core asks for them; everything is checked after each."""
    found, rng = Cycles(), random.Random(seed)
    weights = {one.ref.digest: one.weight_bytes for one in made}
    running: list[str] = []
    for cycle in range(cycles + 1):
        chosen = [one.ref.encode() for one in rng.sample(made, rng.randint(1, SLOTS))]
        running = rng.sample(running, min(len(running), rng.randint(0, 1)))
        step = arrived(tiers, running, chosen)
        tiers.activate(step)
        running = step
        found.violations += violations(tiers, cycle)
        if cycle % SAMPLE_EVERY == 0:
            found.samples.append({"cycle": cycle, **memory(tiers)})
    found.counters = tiers.count().model_dump()
    for kind, one in {one.kind: one for one in made}.items():
        found.waste[kind] = tiers.limits.layout(_groups(one)).num_pages * PAGE_BYTES / one.weight_bytes
    for name, tier in (("in the host pool", tiers.host), ("on the device", tiers.device)):
        found.waste[name] = tier.count().used_bytes / sum(weights[digest] for digest in tier.adapters)
    return found


def arrived(tiers: AdapterTiers, running: list[str], chosen: list[str]) -> list[str]:
    """Ask until something of `chosen` can be computed; running requests end if they are in the way.

    Raises:
        RuntimeError: a file cannot be loaded, or nothing ever arrives.
    """
    until = time.monotonic() + STUCK_S
    while time.monotonic() < until:
        missing = tiers.want(running, chosen, patience=0.05)
        if broken := [reason for reason in missing.values() if reason]:
            raise RuntimeError(broken[0])
        if step := [path for path in chosen if path.rpartition(":")[2] not in missing]:
            return step
        running = []
    raise RuntimeError(f"none of {chosen} arrived within {STUCK_S:.0f} s")


def violations(tiers: AdapterTiers, cycle: int) -> list[str]:
    """Where a tier holds more than it may, or counts other bytes than its adapters have."""
    said = []
    for name, tier in (("host", tiers.host), ("device", tiers.device)):
        counters = tier.count()
        if counters.used_bytes > counters.capacity_bytes:
            said.append(f"cycle {cycle}: {name} has {counters.used_bytes} bytes of {counters.capacity_bytes}")
        if (held := sum(adapter.share.num_bytes for adapter in tier.adapters.values())) != counters.used_bytes:
            said.append(f"cycle {cycle}: {name} counts {counters.used_bytes} bytes for adapters of {held}")
    return said


def memory(tiers: AdapterTiers) -> dict[str, int]:
    """The process's memory in bytes, with no load on its way."""
    wait([adapter.loading for adapter in tiers.host.adapters.values()])
    synchronise()
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if not torch.cuda.is_available():
        return {"rss": resident}
    free, total = torch.cuda.mem_get_info()
    cuda = {"cuda_allocated": torch.cuda.memory_allocated(), "cuda_reserved": torch.cuda.memory_reserved()}
    return {"rss": resident, **cuda, "cuda_in_use": total - free}


def _groups(one: Made) -> Any:
    return read_header(one.ref.path).groups
