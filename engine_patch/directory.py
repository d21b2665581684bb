"""The adapters of a server by name, and which content of each its engine may be asked for.

The folder is a living one: a `.preft` file that is put there is served under its name from then on, one that is replaced stands
for its new content from the next request on, one that is removed is unknown. Requests that run end on what they began with.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.live_files import LiveFiles
from engine_patch.manifest import Manifest
from engine_patch.pool.limits import Limits
from engine_patch.ref import AdapterRef
from engine_patch.requests import request_of
from engine_patch.store.file import read_header, verify_pages
from engine_patch.store.folder import file_in_store, scan_store

logger = logging.getLogger("vllm.preft")

Stamp = tuple[int, int, int]
"""Modification time (ns), size and inode of a file."""

_readers = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "preft-verify")

InUse = Callable[[], Awaitable[list[str]]]
"""Asks the engine for the contents that its requests use."""


class AdapterDirectory:
    """Names to adapter files, and which content of each was admitted."""

    def __init__(self, manifest: Manifest, copies: Path, limits: Limits | None = None) -> None:
        """The adapters of a server.

        Args:
            manifest: what it starts with.
            copies: a folder of this server's own, for the files that its engine may read again at any time.
            limits: what the engine can serve; known only once it is up.
        """
        self.manifest, self.limits = manifest, limits
        self._base = BaseFingerprint.from_dict(manifest.base)
        self._live = LiveFiles(copies)
        self._converted = {
            name: self._held(listed.ref)
            for name, listed in manifest.adapters.items()
            if listed.path.parent != manifest.store
        }
        """By name, adapters that were converted at the start: they do not depend on the folder."""
        self.admitted: dict[str, tuple[Stamp, Any]] = {}
        """By name: the file's stamp, and the `LoRARequest` for its content."""
        self._refused: dict[str, Stamp | None] = {}
        """Names that cannot be listed, and the stamp that their file had when this was said."""
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._seen: tuple[int, set[str]] = (-1, set())

    def _held(self, ref: AdapterRef) -> AdapterRef:
        """`ref` by a link of ours: the cache of converted copies may be pruned by another server."""
        try:
            return self._live.keep(ref) or ref
        except (PreftError, OSError):
            return ref  # its first request says why

    def find(self, name: str) -> Path | None:
        """The file of `name` now; None if there is none.

        Raises:
            PreftError: there is one that must not be used.
        """
        store = self.manifest.store
        if name in self._converted:
            return self._converted[name].path
        if store is None or name in self.manifest.reserved or name in self.manifest.base_names:
            return None
        return file_in_store(store, name)

    def names(self) -> set[str]:
        """All names now; the folder is read only when it has changed."""
        store, fixed = self.manifest.store, set(self._converted)
        if store is None:
            return fixed
        changed = _mtime(store)
        if changed != self._seen[0]:
            try:
                files = set(scan_store(store).files)
            except PreftError as error:
                logger.error("%s", error)
                files = set()
            self._seen = (changed, files - {*self.manifest.reserved, *self.manifest.base_names})
        return fixed | self._seen[1]

    def served_names(self) -> set[str]:
        """All names but those whose files cannot be served."""
        return {name for name in self.names() if not self.is_refused(name)}

    def refuse(self, name: str) -> None:
        """Remember that the file of `name`, as it is now, cannot be served."""
        self._refused[name] = self._stamp(name)

    def is_refused(self, name: str) -> bool:
        """Whether the file of `name` is still the one that could not be served."""
        return name in self._refused and self._refused[name] == self._stamp(name)

    def _stamp(self, name: str) -> Stamp | None:
        try:
            return file_stamp(self.find(name), name)
        except PreftError:
            return None

    def first_request(self, name: str) -> Any:
        """The `LoRARequest` under which `name` is listed before anybody has asked for it.

        Raises:
            PreftError: its file cannot be served.
        """
        listed = self.manifest.adapters.get(name)
        return request_of(name, listed.ref if listed else self._checked(name))

    async def admit(self, name: str, in_use: InUse) -> Any:
        """The `LoRARequest` for what the file of `name` holds now, verified once.

        Requests for one name wait for each other, so that none after a replacement gets the former content.

        Raises:
            PreftError: the adapter cannot be served; the message says why.
        """
        async with self._locks[name]:
            stamp = file_stamp(self.find(name), name)
            known = self.admitted.get(name)
            if known and known[0] == stamp:
                return known[1]
            try:
                while (ref := await asyncio.to_thread(self._take, name)) is None:
                    stamp = file_stamp(self.find(name), name)
            except OSError as error:
                raise PreftError(f"adapter {name!r} cannot be read: {error.strerror} ({error.filename})") from error
            request = request_of(name, ref)
            self.admitted[name] = (stamp, request)
            if known and known[1].lora_path != request.lora_path:
                self._live.retire(_digest(known[1].lora_path))
            await self._tidy(in_use)
            return request

    def forget(self, name: str) -> None:
        """The file of `name` is gone."""
        self._locks.pop(name, None)
        known = self.admitted.pop(name, None)
        if known:
            self._live.retire(_digest(known[1].lora_path))

    async def _tidy(self, in_use: InUse) -> None:
        """Delete the links of contents that no name stands for and no request uses any more."""
        if due := self._live.due():
            used = {*await in_use(), *(_digest(request.lora_path) for _, request in self.admitted.values())}
            used |= {ref.digest for ref in self._converted.values()}
            self._live.remove([digest for digest in due if digest not in used])

    def _take(self, name: str) -> AdapterRef | None:
        """Check the file, link it and verify every byte; None if it was replaced meanwhile."""
        for last in (False, True):
            own = self._live.keep(self._checked(name))
            if own is None:
                return None
            try:
                header = read_header(own.path)
                if header.digest != own.digest:
                    raise PreftError(f"adapter {name!r} was replaced at this very moment; ask again")
                verify_pages(own.path, header, _readers.map)
                return own
            except PreftError:
                # Perhaps only our link is damaged: somebody wrote into a former file of this content. So once more.
                self._live.discard(own.digest)
                if last:
                    raise
        return None

    def _checked(self, name: str) -> AdapterRef:
        path = self.find(name)
        if path is None:
            raise PreftError(f"adapter {name!r} is no longer there")
        header = read_header(path)
        if difference := header.base.mismatch(self._base):
            raise PreftError(f"adapter {name!r} belongs to another base model: {difference}")
        trained_with, served_with = header.meta.get("chat_template_digest"), self.manifest.chat_template
        if served_with and trained_with and trained_with != served_with:
            raise PreftError(f"adapter {name!r} was trained with another chat template than this server uses")
        if self.limits:
            self.limits.check(header, f"adapter {name!r}")
        return AdapterRef(path.resolve(), header.method, header.digest)

    def nearest(self, name: str) -> str:
        """A half sentence with the names most like `name`, or nothing."""
        close = difflib.get_close_matches(name, list(self.names()), n=3, cutoff=0.5)
        return f" Did you mean {' or '.join(close)}?" if close else ""


def file_stamp(path: Path | None, name: str) -> Stamp:
    """What changes when a file is replaced.

    Raises:
        PreftError: the file cannot be read.
    """
    if path is None:
        raise PreftError(f"adapter {name!r} is no longer there")
    try:
        stat = path.stat()
    except OSError as error:
        raise PreftError(f"the adapter's file cannot be read: {error.strerror} ({path})") from None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _digest(lora_path: str) -> str:
    return lora_path.rpartition(":")[2]


def _mtime(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0
