"""The device tier: adapters where the kernels read them, and the table that says how each kind of them lies.

An adapter comes in by one copy of its own bytes, on a stream of its own, so that it overlaps with the steps that are computed
meanwhile. Nothing else is written for it: kernels find it by its first page, which the step tells, and the row of its kind.
One that a trainer made on the device is written between two steps, with the device at rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch

from engine_patch.kernels.step import Place
from engine_patch.pool.arena import Arena, Move, Run
from engine_patch.pool.counters import TierCounters
from engine_patch.pool.cuda import Copies, Event
from engine_patch.pool.share import KINDS_REMEMBERED, Share
from engine_patch.store.layout import PAGE_BYTES

MOVED_AT_ONCE = 1024
"""Pages: 4 MB of memory beside the pool."""


@dataclass(eq=False)
class DeviceAdapter:
    """One adapter on the device."""

    share: Share
    used_in: int = 0
    """The last step that used it."""
    ready: Event | None = None
    """Its bytes have arrived; None on a CPU, and once a step has waited for it."""


class DeviceTier:
    """Holds at most `num_bytes` of adapters, and never moves a byte that a kernel may still read."""

    def __init__(
        self, num_bytes: int, num_slots: int, num_slices: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.arena = Arena(num_bytes // PAGE_BYTES)
        self._page = PAGE_BYTES // dtype.itemsize
        self.pool = torch.zeros(self.arena.num_pages * self._page, dtype=dtype, device=device)
        """`[num_elements]` of the engine's dtype."""
        num_kinds = max(num_slots, KINDS_REMEMBERED)  # writing a row waits for what is queued: it must be rare
        self.table = torch.zeros(num_kinds, num_slices, 4, dtype=torch.int64, device=device)
        """`[kinds, slices, 4]`: `Share.rows` of at least as many kinds as a step can have adapters."""
        self._kinds: OrderedDict[Share, int] = OrderedDict()
        """Rows of the table, least recently used first."""
        self.adapters: dict[str, DeviceAdapter] = {}
        self.counters = TierCounters(capacity_bytes=self.arena.num_pages * PAGE_BYTES)
        self.compactions = 0
        self._copies = Copies(device) if device.type == "cuda" else None
        self._step = 0
        self._freed_after = 0  # the last step that may read pages which are free now

    def begin_step(self) -> None:
        """To be called before anything of a step: what was queued on the device so far belongs to earlier steps."""
        self._step += 1
        if self._copies:
            self._copies.mark()

    def bring(self, digest: str, share: Share, source: torch.Tensor, keep: Callable[[str], bool]) -> bool:
        """Copy an adapter in; False if there is no room beside what `keep` holds.

        On a GPU `source` must not change before `adapters[digest].ready`.

        Args:
            digest: its content.
            share: its layout.
            source: its bytes on the host, uint8 `[share.num_bytes]`.
            keep: which adapters must stay.
        """
        run = self._place(digest, share.layout.num_pages, keep)
        if run is None:
            return False
        ready = None
        if self._copies:
            target = self.pool.data_ptr() + run.start * PAGE_BYTES
            ready = self._copies.copy(target, source.data_ptr(), share.num_bytes, self._step - self._freed_after)
        else:
            self.pool[run.start * self._page : run.stop * self._page] = source.view(self.pool.dtype)
        self.adapters[digest] = DeviceAdapter(share, ready=ready)
        self.counters.misses += 1
        self.counters.loaded_bytes += share.num_bytes
        return True

    @torch.inference_mode()
    def write(self, digest: str, share: Share, weights: torch.Tensor, keep: Callable[[str], bool]) -> bool:
        """Copy an adapter that is on the device already into pages; False if there is no room beside what `keep` holds.

        It waits for the device before and after: what reads the pages' former content may be queued on any stream, and so may
        what makes `weights`. A training step pays for that once.

        Args:
            digest: its name from now on.
            share: its layout.
            weights: `[num_elements]` in that layout, of any dtype; cast to the engine's.
            keep: which adapters must stay.
        """
        self.rest()
        run = self._place(digest, share.layout.num_pages, keep)
        if run is None:
            return False
        self.pool[run.start * self._page : run.stop * self._page].copy_(weights)
        self.rest()
        self.adapters[digest] = DeviceAdapter(share)
        self.counters.loaded_bytes += share.num_bytes
        return True

    def rest(self) -> None:
        """Wait until nothing is queued on the device, on any stream."""
        if self._copies:
            torch.cuda.synchronize(self.pool.device)

    def has_room(self, pages: int, keep: Callable[[str], bool]) -> bool:
        """Whether so many pages can be had beside what `keep` holds."""
        kept = sum(run.pages for digest, run in self.arena.runs.items() if keep(digest))
        return self.arena.num_pages - kept >= pages

    def use(self, digests: list[str]) -> list[Place]:
        """Where a step's adapters, which are resident, are for the kernels queued from now on."""
        shares = {self.adapters[digest].share for digest in digests}
        places = []
        for digest in digests:
            self.arena.touch(digest)
            adapter = self.adapters[digest]
            if self._copies and adapter.ready:
                self._copies.wait_for(adapter.ready)
                adapter.ready = None
            adapter.used_in = self._step
            share, page = adapter.share, self.arena.runs[digest].start
            places.append(Place(self._kind(share, shares), page, share.adapts_linear, share.adapts_streams))
        return places

    def _kind(self, share: Share, used: Container[Share]) -> int:
        """The row of a kind; one that has none takes a free row, or that of a kind which is not `used`."""
        if share in self._kinds:
            self._kinds.move_to_end(share)
            return self._kinds[share]
        if (row := len(self._kinds)) == len(self.table):
            row = self._kinds.pop(next(other for other in self._kinds if other not in used))
        self._kinds[share] = row
        self.table[row] = share.rows.to(self.table.device)
        return row

    def warm_up(self, rank: int) -> Place:
        """A place of zeros: an adapter of this rank on every layer, at the pool's first elements."""
        self.table[:] = torch.tensor([0, 0, rank, 0], device=self.table.device)
        return Place(0, 0, linear=True, streams=True)

    def clear_table(self) -> None:
        """Forget the kinds, and the place of zeros."""
        self.table.zero_()
        self._kinds.clear()

    def drop(self, digest: str) -> None:
        """Forget `digest`."""
        self._forget([digest], free=True)

    def _place(self, digest: str, pages: int, keep: Callable[[str], bool]) -> Run | None:
        """Pages for an adapter; None if there is no room beside what `keep` holds."""
        run, evicted = self.arena.place(digest, pages, lambda other: not keep(other))
        self._forget(evicted)
        if run is None and self._make_room(pages, keep):
            run, _ = self.arena.place(digest, pages, lambda other: False)
        return run

    def _make_room(self, pages: int, keep: Callable[[str], bool]) -> bool:
        """Make one hole of many, and evict no more than that takes; False if what `keep` holds leaves too little."""
        if not self.has_room(pages, keep):
            return False
        for digest in [other for other in self.arena.runs if not keep(other)]:
            if self.arena.num_pages - self.arena.used >= pages:
                break
            self.drop(digest)
        self._move(self.arena.compact())
        return True

    def _forget(self, digests: list[str], free: bool = False) -> None:
        """Drop the records of adapters whose pages are gone (or go, with `free`)."""
        for digest in digests:
            self._freed_after = max(self._freed_after, self.adapters.pop(digest).used_in)
            if free:
                self.arena.free(digest)
        self.counters.evictions += len(digests)

    def _move(self, moves: list[Move]) -> None:
        """Carry out `moves` after everything that is queued, and let copies wait for them."""
        self.compactions += 1
        if self._copies:
            self._copies.before_moves()
        for move in moves:
            # In parts, through a copy: a run may land on itself, and a copy of all of it would take memory that nobody counts.
            for start in range(0, move.pages, MOVED_AT_ONCE):
                count = min(MOVED_AT_ONCE, move.pages - start) * self._page
                source, target = (move.source + start) * self._page, (move.target + start) * self._page
                self.pool[target : target + count] = self.pool[source : source + count].clone()
        if self._copies:
            self._copies.after_moves()

    def count(self) -> TierCounters:
        """The counters as of now."""
        self.counters.used_bytes = self.arena.used * PAGE_BYTES
        self.counters.adapters = len(self.adapters)
        return self.counters
