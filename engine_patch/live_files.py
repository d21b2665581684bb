"""The server's own links to the adapter files in use.

The engine may read an adapter again at any time, and must find what a request was admitted for, though the file in the store has
been replaced or removed meanwhile. A link costs nothing until then; it goes when no request needs the content any more.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from engine_patch.ref import AdapterRef
from engine_patch.store.file import read_header
from engine_patch.store.format import SUFFIX

GRACE_S = 60.0
"""A request that was admitted with a content has reached the engine, and is known there, after so long."""


class LiveFiles:
    """One file for each content, `DIGEST.preft`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._retired: dict[str, float] = {}
        """Digest, and when its name came to stand for another content."""

    def keep(self, ref: AdapterRef) -> AdapterRef | None:
        """`ref` with a path of ours; None if its file was replaced at this very moment.

        Where no link is possible (another file system, or a file of another user), the path stays: copies of all adapters could
        fill the disk. There a request whose adapter's file is replaced while it waits fails, and is to be asked again.

        Raises:
            PreftError: the file is damaged.
            OSError: it is gone.
        """
        self._retired.pop(ref.digest, None)
        own = self._folder / f"{ref.digest}{SUFFIX}"
        if not own.exists():
            aside = own.with_name(f"{secrets.token_hex(4)}-{own.name}")
            try:
                os.link(ref.path, aside)
            except FileNotFoundError:
                raise
            except OSError:
                return ref
            try:
                if read_header(aside).digest != ref.digest:
                    return None
                aside.replace(own)
            finally:
                aside.unlink(missing_ok=True)
        return AdapterRef(own, ref.method, ref.digest)

    def discard(self, digest: str) -> None:
        """Delete the link of a content that turned out to be damaged."""
        (self._folder / f"{digest}{SUFFIX}").unlink(missing_ok=True)

    def retire(self, digest: str) -> None:
        """A name stopped to stand for `digest`."""
        self._retired[digest] = time.monotonic()

    def due(self) -> list[str]:
        """Retired contents that go unless a request still uses them."""
        now = time.monotonic()
        return [digest for digest, since in self._retired.items() if now - since > GRACE_S]

    def remove(self, digests: list[str]) -> None:
        """Delete the links of retired contents."""
        for digest in digests:
            if self._retired.pop(digest, None) is not None:
                self.discard(digest)
