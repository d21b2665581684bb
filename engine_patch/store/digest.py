"""The content digest of an adapter: what caches are keyed by, and what a file is verified against. No torch here.

sha256 over a description (method, dtype, modules with ranks and scalings) and the sha256 of each chunk of the pages, so that the
chunks of a file can be hashed by several threads while others are still being read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

CHUNK_BYTES = 1 << 20


def chunks(num_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each chunk of `num_bytes` bytes of pages."""
    return ((start, min(start + CHUNK_BYTES, num_bytes)) for start in range(0, num_bytes, CHUNK_BYTES))


def chunk_digest(data: bytes | memoryview) -> bytes:
    """sha256 of one chunk; gives up the GIL while it works."""
    return hashlib.sha256(data).digest()


def content_digest(method: str, dtype: str, groups: object, chunk_digests: Iterable[bytes]) -> str:
    """The digest (hex) of an adapter.

    Neither `meta`, nor the base model, nor a file's name matter: equal weights may share.

    Args:
        method: such as `lorap`.
        dtype: of the tensors.
        groups: `Header.groups`.
        chunk_digests: `chunk_digest` of each of `chunks`, in order.
    """
    digest = hashlib.sha256(json.dumps(["preft-adapter-2", method, dtype, groups]).encode())
    for chunk in chunk_digests:
        digest.update(chunk)
    return digest.hexdigest()


def pages_digest(method: str, dtype: str, groups: object, pages: memoryview) -> str:
    """`content_digest` of pages that lie in memory."""
    return content_digest(method, dtype, groups, (chunk_digest(pages[a:b]) for a, b in chunks(len(pages))))
