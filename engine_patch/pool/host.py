"""The host tier: adapters in pinned memory, read from their files by threads, least recently used out first."""

from __future__ import annotations

import os
import weakref
from collections.abc import Container
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from engine_patch.errors import PreftError
from engine_patch.pool.arena import Arena
from engine_patch.pool.counters import TierCounters
from engine_patch.pool.cuda import Event
from engine_patch.pool.pinned import host_buffer, pin_memory, unpin_memory
from engine_patch.pool.share import Share, Sharer
from engine_patch.ref import AdapterRef
from engine_patch.store.file import check_layout, read_header
from engine_patch.store.format import Header
from engine_patch.store.layout import PAGE_BYTES

T = TypeVar("T")

LOADERS = 4
"""Adapters that are read side by side."""

REMEMBERED = 1024
"""Adapters whose layout is remembered; then it begins anew."""


@dataclass(eq=False)
class HostAdapter:
    """One adapter in host memory, or on its way there."""

    share: Share
    bytes: torch.Tensor
    """uint8 `[share.num_bytes]`, a part of the pool."""
    loading: Future[None]
    copied: Event | None = None
    """The last copy to the device is over. The bytes must not change before."""


class HostTier:
    """Holds at most `num_bytes` of adapters.

    The worker's one thread calls all methods; others pin the memory, look at headers, and fill bytes.
    """

    def __init__(self, num_bytes: int, sharer: Sharer, device: torch.device) -> None:
        self._arena = Arena(num_bytes // PAGE_BYTES)
        self._buffer = host_buffer(self._arena.num_pages * PAGE_BYTES, device)
        self._sharer = sharer
        self._loaders = ThreadPoolExecutor(LOADERS, "preft-load")
        self._pinning: Future[None] | None = None
        if device.type == "cuda":
            # In a thread: it takes a fifth of a second for each GB, in which the engine compiles its model.
            pinning = self._loaders.submit(pin_memory, self._buffer, torch.cuda.current_device())
            # Else the address stays registered, and whoever gets the memory next cannot pin it.
            weakref.finalize(self, unpin_memory, self._buffer.data_ptr(), pinning).atexit = False
            self._pinning = pinning
        self._readers = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "preft-read")
        self._inspections: dict[str, Future[Share]] = {}
        self._shares: dict[str, Share] = {}
        """Of adapters that were looked at: asking again for one without room costs nothing."""
        self.adapters: dict[str, HostAdapter] = {}
        self.counters = TierCounters(capacity_bytes=self._arena.num_pages * PAGE_BYTES)

    def settle(self) -> None:
        """Wait until the memory is pinned. No CUDA graph may be captured before.

        Raises:
            PreftError: the system does not allow so much.
        """
        if self._pinning:
            self._pinning.result()
            self._pinning = None

    def start(self, ref: AdapterRef, protected: Container[str]) -> bool | None:
        """Begin to load an adapter that is not here; None if its file has yet to be looked at, False if there is no room.

        Room is made of everything that is not `protected`: what is needed later gives way to what is needed first.

        Raises:
            PreftError: the file is gone, damaged, holds something else by now, or does not fit the engine.
        """
        self.settle()
        share = self._shares.get(ref.digest)
        if share is None:
            looking = self._inspections.pop(ref.digest, None) or self._loaders.submit(self._inspect, ref)
            if not looking.done():
                if len(self._inspections) >= REMEMBERED:  # of requests that were aborted meanwhile
                    self._inspections.clear()
                self._inspections[ref.digest] = looking
                return None
            share = _result(looking, ref)
            if len(self._shares) >= REMEMBERED:
                self._shares.clear()
            self._shares[ref.digest] = share
        run, evicted = self._arena.place(
            ref.digest, share.layout.num_pages, lambda other: other not in protected and self._idle(other)
        )
        for digest in evicted:
            del self.adapters[digest]
        self.counters.evictions += len(evicted)
        if run is None:
            return False
        part = self._buffer[run.start * PAGE_BYTES : run.stop * PAGE_BYTES]
        self.adapters[ref.digest] = HostAdapter(share, part, self._loaders.submit(self._load, ref, part))
        self.counters.misses += 1
        self.counters.loaded_bytes += share.num_bytes
        return True

    def _inspect(self, ref: AdapterRef) -> Share:
        """Look at the file's header, in a thread: a slow disk must not hold up the engine's steps."""
        header = self._header(ref)
        check_layout(header, ref.path)
        self._sharer.limits.check(header, ref.path)
        return self._sharer.share(header)

    def _load(self, ref: AdapterRef, part: torch.Tensor) -> None:
        self._sharer.load(ref.path, self._header(ref), part, self._readers.map)

    @staticmethod
    def _header(ref: AdapterRef) -> Header:
        header = read_header(ref.path)
        if (header.method, header.digest) != (ref.method, ref.digest):
            raise PreftError(f"{ref.path} was replaced while a request for its former content was waiting; ask again")
        return header

    def ready(self, ref: AdapterRef) -> bool:
        """Whether the adapter is here as a whole.

        Raises:
            PreftError: its load failed; it is forgotten with that, so that the next request tries again.
        """
        adapter = self.adapters.get(ref.digest)
        if adapter is None or not adapter.loading.done():
            return False
        try:
            _result(adapter.loading, ref)
        except PreftError:
            self.drop(ref.digest)
            raise
        return True

    def touch(self, digest: str) -> None:
        """Make `digest` the most recently used."""
        self._arena.touch(digest)

    def drop(self, digest: str) -> None:
        """Forget `digest`, whose load is over, and what its file looked like."""
        self._shares.pop(digest, None)
        self._arena.free(digest)
        del self.adapters[digest]

    def forget(self, digest: str) -> None:
        """Drop `digest` if it is here and nobody works on it."""
        if digest in self.adapters and self._idle(digest):
            self.drop(digest)

    def wait(self, digests: list[str], seconds: float | None) -> bool:
        """Wait until there is news of one of `digests`, or so long; False if none is on its way."""
        pending: list[Future[Any]] = [self.adapters[digest].loading for digest in digests if digest in self.adapters]
        pending += [self._inspections[digest] for digest in digests if digest in self._inspections]
        if pending:
            wait(pending, seconds, FIRST_COMPLETED)
        return bool(pending)

    def _idle(self, digest: str) -> bool:
        """Whether nobody writes its bytes, and no copy to the device reads them."""
        adapter = self.adapters[digest]
        in_flight = adapter.copied is not None and not adapter.copied.query()
        return adapter.loading.done() and not in_flight

    def count(self) -> TierCounters:
        """The counters as of now."""
        self.counters.used_bytes = self._arena.used * PAGE_BYTES
        self.counters.adapters = len(self.adapters)
        return self.counters


def _result(done: Future[T], ref: AdapterRef) -> T:
    """What a thread found out; whatever went wrong there is this adapter's error alone, and never the engine's end."""
    try:
        return done.result()
    except PreftError:
        raise
    except Exception as error:
        raise PreftError(f"{ref.path} cannot be loaded: {type(error).__name__}: {error}") from error
