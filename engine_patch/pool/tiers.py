"""The tiers of one worker together: files, host, device. What is wanted soon moves ahead of the step that needs it.

The engine core says before every step which adapters it wants (`want`); only those that have arrived are scheduled, and of these
so many that up to half of the device is left to others which are to be copied. A step then takes its adapters (`activate`),
which is one copy each for those that are not on the device already.
"""

from __future__ import annotations

import time
from collections.abc import Container

import torch

from engine_patch.errors import PreftError
from engine_patch.kernels.step import Place
from engine_patch.pool.counters import PoolCounters
from engine_patch.pool.device import DeviceTier
from engine_patch.pool.host import HostTier
from engine_patch.pool.layers import EngineLayers
from engine_patch.pool.limits import Limits
from engine_patch.pool.live import LiveVersions
from engine_patch.pool.share import Sharer
from engine_patch.ref import AdapterRef, parse_ref
from engine_patch.store.layout import PAGE_BYTES

NOT_YET = ""
"""The state of an adapter that is on its way."""

LOADING_AT_ONCE = 64
"""Adapters of waiting requests that are on their way at once."""

ROOM_TIMEOUT_S = 60.0
"""How long a step that was not announced waits for room in host memory."""


class AdapterTiers:
    """Where every adapter of this worker is, and how it gets to the device."""

    def __init__(
        self, layers: EngineLayers, limits: Limits, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        sharer = Sharer(layers, limits, dtype)
        self.limits = limits
        self.host = HostTier(limits.host_bytes, sharer, device)
        self.device = DeviceTier(limits.device_bytes, num_slots, len(limits.modules), dtype, device)
        self.live = LiveVersions(self.device, sharer)
        self._num_slots = num_slots
        self._running: set[str] = set()
        self._wanted: set[str] = set()
        self._failures = self._waits = 0
        self._wait_seconds = 0.0

    def want(self, running: list[str], waiting: list[str], patience: float = 0.0) -> dict[str, str]:
        """Bring adapters closer, in order; says what has not arrived: its digest, and why (`NOT_YET`, or the error).

        Args:
            running: references (`AdapterRef.encode`) of requests with prompt tokens left, whose adapters stay on the device.
            waiting: references of the requests that come next.
            patience: seconds to wait if nothing has arrived yet.
        """
        self.device.begin_step()
        self.live.free()
        self._running = {parse(path).digest for path in running}
        refs = {ref.digest: ref for ref in map(parse, waiting)}
        self._wanted = set(refs)
        until = time.perf_counter() + patience
        missing = self._advance(refs)
        while len(missing) == len(refs) and not any(missing.values()) and (left := until - time.perf_counter()) > 0:
            if not self.host.wait(list(missing), left):
                break
            missing = self._advance(refs)
        missing |= self._crowded_out([digest for digest in refs if digest not in missing])
        arrived = [digest for digest in refs if digest not in missing]
        room = self._room()
        fitting = arrived[: self._leading(arrived, room)]
        taken = fitting[: max(1, self._leading(fitting, room - self._spare(arrived, room)))]
        self._bring_ahead(fitting)
        there = {*self.live, *self._running.intersection(fitting)}
        later = [digest for digest in arrived[len(taken) :] if digest not in there]
        return missing | dict.fromkeys(later, NOT_YET)

    def _spare(self, digests: list[str], room: int) -> int:
        """Pages that a step leaves to adapters which are still to be copied, at most half.

        Else a step takes what the pool holds, and nothing stays for the next: with it, 512 requests for 128 adapters of rank 64
        led to 190 loads on an H200 instead of 361 (`examples/results/README.md`).
        """
        return min(room // 2, sum(self._pages(digest) for digest in digests if digest not in self.device.adapters))

    def _room(self) -> int:
        """Pages of the device beside the adapters of running requests, and live ones."""
        return self.device.arena.num_pages - sum(map(self._pages, {*self._running, *self.live}))

    def _leading(self, digests: list[str], room: int) -> int:
        """How many of `digests`, from the first on, so many pages can hold beside what is there anyway (see `_room`).

        Those behind the first that does not fit wait with it, so that small adapters do not pass a large one for ever.
        """
        there = {*self._running, *self.live}
        for count, digest in enumerate(digests):
            room -= 0 if digest in there else self._pages(digest)
            if room < 0:
                return count
        return len(digests)

    def _crowded_out(self, digests: list[str]) -> dict[str, str]:
        """Which of `digests` can never have a place beside the live adapters, and why."""
        if not self.live.present:
            return {}
        room = self.device.arena.num_pages - sum(self._pages(digest) for digest in self.live.present)
        return {
            digest: f"it takes {self._pages(digest) * PAGE_BYTES} bytes, and beside the live adapters serve.gpu_pool has"
            f" {room * PAGE_BYTES}; raise it"
            for digest in digests
            if self._pages(digest) > room and digest not in self.live
        }

    def _pages(self, digest: str) -> int:
        adapter = self.device.adapters.get(digest) or self.host.adapters.get(digest)
        return adapter.share.layout.num_pages if adapter else 0

    def _advance(self, refs: dict[str, AdapterRef]) -> dict[str, str]:
        """Begin to load what is not here, in order; what has not arrived, and why.

        An adapter that finds no room holds back the loads behind it, and may push out what arrived for later requests: else
        small adapters would take every hole before it is large enough.
        """
        missing: dict[str, str] = {}
        before: set[str] = set()
        room = True
        for digest, ref in refs.items():
            try:
                if ref.live:
                    self.live.require(ref)
                elif digest not in self.device.adapters and digest in self.host.adapters:
                    if not self.host.ready(ref):
                        missing[digest] = NOT_YET
                elif digest not in self.device.adapters:
                    missing[digest] = NOT_YET
                    if room and len(missing) <= LOADING_AT_ONCE:
                        room = self.host.start(ref, before) is not False
            except PreftError as error:
                missing[digest] = str(error)
                self._failures += 1
            before.add(digest)
        return missing

    def _at_hand(self, ref: AdapterRef, protected: Container[str]) -> bool:
        """Whether the adapter is in host memory; begins to load it if not, as soon as there is room."""
        if ref.digest in self.host.adapters:
            return self.host.ready(ref)
        self.host.start(ref, protected)
        return False

    def _bring_ahead(self, digests: list[str]) -> None:
        """Copy the next ones to the device while a step is computed; none makes room for another, since all fit together."""
        keep = self._running.union(digests)
        for digest in digests[: self._num_slots]:
            if digest not in self.device.adapters and not self._bring(digest, keep):
                return

    def _bring(self, digest: str, keep: set[str]) -> bool:
        adapter = self.host.adapters[digest]
        self.host.touch(digest)
        done = self.device.bring(digest, adapter.share, adapter.bytes, {*keep, *self.live}.__contains__)
        if done:
            self.host.counters.hits += 1
            adapter.copied = self.device.adapters[digest].ready
        return done

    def activate(self, lora_paths: list[str]) -> list[Place]:
        """The places of a step's adapters, at most as many as there are slots; brings in what is not on the device.

        Raises:
            PreftError: an adapter that was not asked for with `want` cannot be loaded.
        """
        refs = [parse(path) for path in lora_paths]
        digests = [ref.digest for ref in refs]
        self.device.begin_step()
        for ref in refs:
            if ref.digest in self.device.adapters:
                self.device.counters.hits += 1
                continue
            self.load(ref, set(digests))
            if not (self._bring(ref.digest, {*digests, *self._running}) or self._bring(ref.digest, set(digests))):
                raise PreftError(f"the device pool has no room for the adapters of one step, {len(digests)} of them")
        return self.device.use(digests)

    def load(self, ref: AdapterRef, protected: Container[str] = ()) -> None:
        """Have the adapter in host memory, beside those that are `protected`, and wait for it if need be.

        Raises:
            PreftError: it cannot be loaded; or it is a live one, which no file can bring back.
        """
        if ref.live:
            return self.live.require(ref)
        started = time.perf_counter()
        waited = False
        try:
            while not self._at_hand(ref, protected):
                waited = True
                if self.host.wait([ref.digest], None):
                    continue
                if time.perf_counter() - started > ROOM_TIMEOUT_S:
                    raise PreftError(f"no room in host memory for {ref.path}; raise serve.host_pool")
                time.sleep(0.001)
        finally:
            if waited:
                self._waits += 1
                self._wait_seconds += time.perf_counter() - started

    def warm_up(self, rank: int) -> Place:
        """A place of zeros in the pool, which is still empty, of a rank that it has room for."""
        widest = 1 + max(max(sizes.local) for sizes in self.limits.modules.values())  # with a bias
        return self.device.warm_up(min(rank, self.device.pool.numel() // widest))

    def forget(self, digest: str) -> bool:
        """Drop an adapter from host and device, unless a request is about to use it, or it is a live one; says whether it did."""
        if digest in self._running or digest in self._wanted or digest in self.live:
            return False
        if digest in self.device.adapters:
            self.device.drop(digest)
        self.host.forget(digest)
        return True

    def count(self) -> PoolCounters:
        """The counters as of now."""
        return PoolCounters(
            device=self.device.count(),
            host=self.host.count(),
            load_failures=self._failures,
            step_waits=self._waits,
            step_wait_seconds=self._wait_seconds,
            compactions=self.device.compactions,
        )


def parse(lora_path: str) -> AdapterRef:
    """The adapter that a request names.

    Raises:
        PreftError: a stock adapter, which stock kernels would apply to all tokens.
    """
    ref = parse_ref(lora_path)
    if ref is None:
        raise PreftError(
            f"{lora_path} is a stock adapter: convert it (preft convert), or set PREFT_DISABLE=1 to run the stock engine"
        )
    return ref
