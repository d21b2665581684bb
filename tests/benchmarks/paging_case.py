"""The measurements of `bench_paging` on adapters of one shape and rank."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine_patch.pool.tiers import AdapterTiers
from engine_patch.ref import AdapterRef
from engine_patch.store.layout import PAGE_BYTES
from tests.benchmarks import disk
from tests.benchmarks.common import in_turn, seconds, synchronise
from tests.benchmarks.material import Shape
from tests.benchmarks.stock_lora import Stock

Times = dict[str, list[float]]
"""Seconds of each repetition, by what was measured."""

WARM_UP = 3
"""Repetitions that do not count."""


class Case:
    """Our tiers and vLLM's manager, each with all adapters in host memory, and room for half of them on the device."""

    def __init__(
        self, shape: Shape, rank: int, refs: list[AdapterRef], folders: list[Path], config: Any, device: torch.device
    ) -> None:
        self.refs, self.folders = refs, folders
        self.resident = len(refs) // 2
        unlimited = shape.limits(rank, torch.bfloat16, 1 << 62, 1 << 62)
        self.num_bytes = unlimited.largest_pages() * PAGE_BYTES
        limits = shape.limits(rank, torch.bfloat16, self.resident * self.num_bytes, len(refs) * self.num_bytes)
        self.tiers = AdapterTiers(shape.layers(), limits, self.resident, torch.bfloat16, device)
        self.stock = Stock(shape, rank, self.resident, len(refs) + 1, config, device)
        for index, (ref, folder) in enumerate(zip(refs, folders, strict=True)):
            self.tiers.load(ref)
            self.stock.load(index + 1, folder)
        self.times: Times = defaultdict(list)
        for index in range(self.resident):
            self.host_to_slot(index)
        self._check_arrived()

    def host_to_slot(self, index: int) -> float:
        """Ours: an adapter that is in host memory only can be used by kernels. The least recently used one goes."""
        digest, tier = self.refs[index].digest, self.tiers.device
        if digest in tier.adapters:
            raise RuntimeError("the adapter is on the device already: nothing would be measured")
        adapter = self.tiers.host.adapters[digest]
        started = time.perf_counter()
        tier.begin_step()
        brought = tier.bring(digest, adapter.share, adapter.bytes, lambda other: False)
        queued = time.perf_counter()
        tier.use([digest])
        used = time.perf_counter()
        synchronise()
        ended = time.perf_counter()
        if not brought:
            raise RuntimeError("the device pool had no room")
        self.times["part: bring returns"].append(queued - started)
        self.times["part: use returns"].append(used - queued)
        self.times["part: synchronise"].append(ended - used)
        return ended - started

    def copy(self, index: int) -> float:
        """As many bytes from the same pinned pool to the same device pool by one `copy_`."""
        tier = self.tiers.device
        start = next(iter(tier.arena.runs.values())).start * PAGE_BYTES
        target = tier.pool.view(torch.uint8)[start : start + self.num_bytes]
        source = self.tiers.host.adapters[self.refs[index].digest].bytes

        def work() -> None:
            target.copy_(source, non_blocking=True)
            synchronise()

        return seconds(work)

    def activate(self, index: int) -> float:
        """vLLM: its `activate_adapter` for an adapter that is in host memory only."""

        def work() -> None:
            self.stock.manager.activate_adapter(index + 1)
            synchronise()

        if index + 1 in self.stock.manager._active_adapters:
            raise RuntimeError("the adapter is active already: nothing would be measured")
        return seconds(work)

    def file_to_host(self, index: int) -> float:
        """Ours: from a file to verified bytes in pinned memory."""
        ref = self.refs[index]
        self.tiers.host.drop(ref.digest)
        return seconds(lambda: self.tiers.load(ref))

    def stock_load(self, index: int) -> float:
        """vLLM: from a PEFT folder to packed, pinned tensors."""
        spare = len(self.refs) + 1
        taken = seconds(lambda: self.stock.load(spare, self.folders[index]))
        self.stock.forget(spare)
        return taken

    def transfers(self, repeats: int) -> Times:
        """Host to device, all sides in turn; adapters in turn, so that none is resident when it is asked for."""
        ours, plain, theirs = (itertools.cycle(range(len(self.refs))) for _ in range(3))
        for _ in range(self.resident):  # what is on the device already
            next(ours), next(plain), next(theirs)
        sides = {
            "host_to_slot": lambda: self.host_to_slot(next(ours)),
            "copy": lambda: self.copy(next(plain)),
            "stock": lambda: self.activate(next(theirs)),
        }
        return self._measure(sides, repeats)

    def reads(self, repeats: int) -> tuple[Times, Times, list[float]]:
        """Disk to host, all sides in turn, each on a file of its own: cold, and the same again warm.

        Returns the times of both, and for each repetition the largest share of a file that was cached in spite of all.
        """
        cold: Times = defaultdict(list)
        warm: Times = defaultdict(list)
        shares = []
        count = len(self.refs)
        for repetition in range(repeats + 1):
            # Every file serves every side in the end: none has faster ones, whatever lies below the page cache.
            ours, plain, theirs = ((repetition + shift * count // 3) % count for shift in range(3))
            files = [self.refs[ours].path, self.refs[plain].path, self.folders[theirs]]
            shares.append(max([disk.drop(file) for file in files]))
            sides = {
                "file_to_host": partial(self.file_to_host, ours),
                "dd": partial(disk.dd_seconds, self.refs[plain].path),
                "stock_load": partial(self.stock_load, theirs),
            }
            for times in (cold, warm):
                for name, taken in in_turn(sides, repetition).items():
                    times[name].append(taken)
        return _without(cold, 1), _without(warm, 1), shares[1:]

    def _measure(self, sides: dict[str, Any], repeats: int) -> Times:
        self.times.clear()
        for repetition in range(repeats + WARM_UP):
            for name, taken in in_turn(sides, repetition).items():
                self.times[name].append(taken)
        return _without(self.times, WARM_UP)

    def _check_arrived(self) -> None:
        """The bytes on the device are those of the host: what is measured does what it should."""
        tier, host = self.tiers.device, self.tiers.host
        for digest, run in tier.arena.runs.items():
            found = tier.pool.view(torch.uint8)[run.start * PAGE_BYTES : run.stop * PAGE_BYTES].cpu()
            if not torch.equal(found, host.adapters[digest].bytes):
                raise RuntimeError("an adapter has other bytes on the device than in host memory")


def _without(times: Times, first: int) -> Times:
    return {name: values[first:] for name, values in times.items()}
