"""Versions of live adapters: weights that a trainer in this process writes to the device, with no file behind them.

Nothing can bring one back, so it stays while it is needed: as the present version of its adapter, or by a request in the engine.
That may be one that decodes and holds no slot: after a preemption it computes its prompt anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from engine_patch.adapter import LowRankPair
from engine_patch.errors import PreftError
from engine_patch.pool.device import DeviceTier
from engine_patch.pool.gather import Gather
from engine_patch.pool.share import Share, Sharer
from engine_patch.ref import AdapterRef
from engine_patch.store.format import Header
from engine_patch.store.layout import PAGE_BYTES


@dataclass(frozen=True, eq=False)
class LiveKind:
    """What all versions with tensors of the same shapes have in common."""

    share: Share
    gather: Gather


class LiveVersions:
    """Those of one worker; each lies in the device tier, under its digest."""

    def __init__(self, device: DeviceTier, sharer: Sharer) -> None:
        self._device, self._sharer = device, sharer
        self._versions: set[str] = set()
        self.present: set[str] = set()
        """One of each live adapter."""
        self.in_use: Callable[[], Collection[str]] = frozenset
        """The contents that requests in the engine use."""

    def __contains__(self, digest: str) -> bool:
        return digest in self._versions

    def __iter__(self) -> Iterator[str]:
        return iter(self._versions)

    def kind(self, header: Header, where: str, pairs: Mapping[str, LowRankPair]) -> LiveKind:
        """Look once at adapters like `pairs`.

        Raises:
            PreftError: as `Limits.check` does, which names the adapter `where`.
        """
        self._sharer.limits.check(header, where)
        share = self._sharer.share(header)
        return LiveKind(share, Gather(pairs, share.layout, self._device.pool.device))

    def put(
        self,
        digest: str,
        kind: LiveKind,
        pairs: Mapping[str, LowRankPair],
        *,
        replaces: str | None,
        acting: Collection[str],
    ) -> None:
        """Write a version and make it the present one; a former one stays for the requests that use it.

        Args:
            digest: its name, never used before.
            kind: of `pairs`.
            pairs: its weights, on any device.
            replaces: the version that was present until now.
            acting: contents that the next step may use, which must not be evicted.

        Raises:
            PreftError: no room beside those that are needed; nothing has changed then.
        """
        used = {*self.in_use()}
        stay = {*acting, *((self.present - {replaces}) | (self._versions & used))}
        pages = kind.share.layout.num_pages
        if not self._device.has_room(pages, stay.__contains__):
            held = len(self._versions & used)
            raise PreftError(
                f"no room for one more version of a live adapter: it takes {pages * PAGE_BYTES} bytes, and serve.gpu_pool has"
                f" {self._device.arena.num_pages * PAGE_BYTES}, of which requests in flight use {held} earlier versions; raise"
                " serve.gpu_pool or serve.gpu_slots, or sync when they have ended"
            )
        weights = kind.gather(pairs)
        self.retire(replaces)
        written = self._device.write(digest, kind.share, weights, stay.__contains__)
        assert written, "there was room for it, and nothing has taken it"
        self._versions.add(digest)
        self.present.add(digest)

    def retire(self, digest: str | None) -> None:
        """A version that is present no more; its pages go when no request uses it."""
        self.present.discard(digest or "")
        self.free()

    def free(self) -> None:
        """Give back the pages of former versions that nobody uses."""
        if former := self._versions - self.present:
            for digest in former.difference(self.in_use()):
                self._versions.discard(digest)
                self._device.drop(digest)

    def require(self, ref: AdapterRef) -> None:
        """Refuse a version that is gone.

        Raises:
            PreftError: it is.
        """
        if ref.digest not in self._versions:
            raise PreftError(
                f"the weights of {ref.path} were replaced before this request came; take LiveAdapter.request after each sync"
            )
