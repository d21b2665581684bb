"""The host tier: adapters in pinned memory, read from their files by threads, least recently used out first."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from engine_patch.errors import PreftError
from engine_patch.pool.arena import Arena
from engine_patch.pool.counters import TierCounters
from engine_patch.pool.share import Share, Sharer
from engine_patch.ref import AdapterRef
from engine_patch.store.file import check_layout, read_header
from engine_patch.store.layout import PAGE_BYTES

LOADERS = 4
"""Adapters that are read side by side."""


@dataclass(eq=False)
class HostAdapter:
    """One adapter in host memory, or on its way there."""

    share: Share
    bytes: torch.Tensor
    """uint8 `[share.num_bytes]`, a part of the pool."""
    loading: Future[None]
    copied: Any = None
    """CUDA event: the last copy to the device is over. The bytes must not change before."""


class HostTier:
    """Holds at most `num_bytes` of adapters. All methods are called by the worker's one thread; threads only fill bytes."""

    def __init__(self, num_bytes: int, sharer: Sharer, pin: bool) -> None:
        self._arena = Arena(num_bytes // PAGE_BYTES)
        self._buffer = torch.empty(self._arena.num_pages * PAGE_BYTES, dtype=torch.uint8, pin_memory=pin)
        self._sharer = sharer
        self._loaders = ThreadPoolExecutor(LOADERS, "preft-load")
        self._readers = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "preft-read")
        self.adapters: dict[str, HostAdapter] = {}
        self.wanted: set[str] = set()
        """Not to be evicted."""
        self.counters = TierCounters(capacity_bytes=self._arena.num_pages * PAGE_BYTES)

    def start(self, ref: AdapterRef) -> bool:
        """Begin to load an adapter that is not here; False if there is no room for it now.

        Raises:
            PreftError: the file is gone, damaged, holds something else by now, or does not fit the engine.
        """
        header = read_header(ref.path)
        if (header.method, header.digest) != (ref.method, ref.digest):
            raise PreftError(f"{ref.path} was replaced while a request for its former content was waiting; ask again")
        check_layout(header, ref.path)
        self._sharer.limits.check(header, ref.path)
        share = self._sharer.share(header)
        run, evicted = self._arena.place(ref.digest, share.layout.num_pages, self._evictable)
        for digest in evicted:
            del self.adapters[digest]
        self.counters.evictions += len(evicted)
        if run is None:
            return False
        part = self._buffer[run.start * PAGE_BYTES : run.stop * PAGE_BYTES]
        loading = self._loaders.submit(self._sharer.load, ref.path, header, part, self._readers.map)
        self.adapters[ref.digest] = HostAdapter(share, part, loading)
        self.counters.misses += 1
        self.counters.loaded_bytes += share.num_bytes
        return True

    def ready(self, digest: str) -> bool:
        """Whether `digest` is here as a whole.

        Raises:
            PreftError: its load failed; it is forgotten with that, so that the next request tries again.
        """
        adapter = self.adapters.get(digest)
        if adapter is None or not adapter.loading.done():
            return False
        if error := adapter.loading.exception():
            self.drop(digest)
            raise error if isinstance(error, PreftError) else PreftError(f"loading {digest[:12]} failed: {error}")
        return True

    def touch(self, digest: str) -> None:
        """Make `digest` the most recently used."""
        self._arena.touch(digest)

    def drop(self, digest: str) -> None:
        """Forget `digest`, whose load is over."""
        self._arena.free(digest)
        del self.adapters[digest]

    def wait(self, digests: list[str], seconds: float | None) -> None:
        """Wait until one of the loads of `digests` is over, or so long."""
        pending = [self.adapters[digest].loading for digest in digests if digest in self.adapters]
        if pending:
            wait(pending, seconds, FIRST_COMPLETED)

    def _evictable(self, digest: str) -> bool:
        adapter = self.adapters[digest]
        in_flight = adapter.copied is not None and not adapter.copied.query()
        return digest not in self.wanted and adapter.loading.done() and not in_flight

    def count(self) -> TierCounters:
        """The counters as of now."""
        self.counters.used_bytes = self._arena.used * PAGE_BYTES
        self.counters.adapters = len(self.adapters)
        return self.counters
