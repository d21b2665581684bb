"""One `.preft` file: written atomically, its header read cheaply, its content verified when loaded."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_patch.errors import PreftError
from engine_patch.rule import METHODS
from engine_patch.store.atomic import atomic_write
from engine_patch.store.digest import chunk_digest, chunks, content_digest, pages_digest
from engine_patch.store.folder import adapter_name, check_name
from engine_patch.store.format import (
    ITEMSIZE,
    MAX_HEADER,
    SUFFIX,
    Header,
    decode_header,
    encode_header,
    group_modules,
    layout_of,
)
from engine_patch.store.layout import PAGE_BYTES, ModuleLayout

if TYPE_CHECKING:
    from engine_patch.adapter import Adapter


def write_adapter(path: Path, adapter: Adapter) -> Header:
    """Write `adapter` to `path` (`<folder>/NAME.preft`); a file that is there is replaced in one step.

    Raises:
        PreftError: a file name that is no adapter name.
        OSError: the disk is full, the folder missing or read-only; nothing is left behind.
    """
    if path.suffix != SUFFIX:
        raise PreftError(f"{path}: an adapter file is called NAME{SUFFIX}")
    check_name(adapter_name(path))
    header, pages = encode(adapter)
    encoded = encode_header(header)
    atomic_write(path, [encoded, pages])
    return decode_header(encoded[8:], str(path))


def encode(adapter: Adapter) -> tuple[Header, memoryview]:
    """The header of `adapter` and the bytes of its pages."""
    from engine_patch.adapter import tensor_bytes
    from engine_patch.store.pages import pack

    described = describe(adapter)
    pages = tensor_bytes(pack(adapter.pairs, described.layout))
    digest = pages_digest(adapter.method, adapter.dtype, described.groups, pages)
    return replace(described, digest=digest), pages


def describe(adapter: Adapter) -> Header:
    """The header of `adapter` without a digest: its weights are not looked at."""
    groups = group_modules(
        {
            name: ModuleLayout(pair.rank, pair.in_features, pair.out_features, pair.scaling, pair.bias is not None)
            for name, pair in adapter.pairs.items()
        }
    )
    layout = layout_of(groups, ITEMSIZE[adapter.dtype])
    return Header(
        method=adapter.method,
        rank=adapter.rank,
        digest="",
        base=adapter.base,
        dtype=adapter.dtype,
        meta=adapter.meta,
        groups=groups,
        num_pages=layout.num_pages,
        page_elements=layout.page_elements,
        num_bytes=layout.num_pages * PAGE_BYTES,
    )


def read_header(path: Path | str) -> Header:
    """Read and check only the header of `path`; neither torch nor the tensors are touched.

    Raises:
        PreftError: not a `.preft` file, another format version, an unknown method, a damaged header, or a file whose
            size is not what its header says (truncated or half-written).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_header(descriptor, path)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PreftError(f"cannot read {path}: {error.strerror}") from error


def _read_header(descriptor: int, path: Path | str) -> Header:
    size = os.fstat(descriptor).st_size
    start = os.pread(descriptor, PAGE_BYTES, 0)  # most headers are no longer
    length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
    # The size decides first: a garbage length must not make us allocate it.
    if length == 0 or length > MAX_HEADER:
        raise PreftError(f"{path} is not a {SUFFIX} file ({size} bytes); convert the adapter again")
    if 8 + length > size:
        raise PreftError(_truncated(path, size, f"its header alone needs {8 + length}"))
    encoded = start[8 : 8 + length]
    if len(encoded) < length:
        encoded = os.pread(descriptor, length, 8)
    header = decode_header(encoded, str(path))
    expected = header.data_start + header.num_bytes
    if size != expected:
        raise PreftError(_truncated(path, size, f"its header says {expected}"))
    if header.method not in METHODS:
        raise PreftError(f"{path}: unknown adapter method {header.method!r}; known: {', '.join(sorted(METHODS))}")
    return header


Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or that of a thread pool: chunks are then read and hashed side by side."""


def read_pages(path: Path, header: Header, into: memoryview, each: Each = map) -> None:
    """Read the pages of `path` into `into`, `[header.num_bytes]` (such as pinned memory), and verify them.

    Raises:
        PreftError: the file was truncated, or its content is not what its digest says.
    """

    def read(descriptor: int, start: int, stop: int) -> memoryview:
        part, done = into[start:stop], 0
        while done < len(part) and (count := os.preadv(descriptor, [part[done:]], header.data_start + start + done)):
            done += count
        return part[:done]

    _read_and_verify(path, header, read, each)


def verify_pages(path: Path, header: Header, each: Each = map) -> None:
    """Verify the pages of `path` as `read_pages` does, and keep nothing of them."""
    _read_and_verify(
        path, header, lambda file, start, stop: os.pread(file, stop - start, header.data_start + start), each
    )


def _read_and_verify(
    path: Path, header: Header, read: Callable[[int, int, int], bytes | memoryview], each: Each
) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Several readers take chunks out of order; the kernel reads ahead all the same if told.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            spans = list(chunks(header.num_bytes))
            digests = list(each(lambda span: chunk_digest(read(descriptor, *span)), spans))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PreftError(f"cannot read {path}: {error.strerror}") from error
    if (digest := content_digest(header.method, header.dtype, header.groups, digests)) != header.digest:
        raise PreftError(
            f"{path} is damaged: its content has the digest {digest[:12]} where its header says {header.digest[:12]};"
            " convert the adapter again"
        )


def read_adapter(path: Path) -> Adapter:
    """Load `path` and verify all of it.

    Raises:
        PreftError: whatever `read_header` and `read_pages` raise.
    """
    import torch

    from engine_patch.adapter import DTYPES, Adapter
    from engine_patch.store.pages import unpack

    header = read_header(path)
    layout = check_layout(header, path)
    data = bytearray(header.num_bytes)
    read_pages(path, header, memoryview(data))
    pages = torch.frombuffer(data, dtype=DTYPES[header.dtype])
    return Adapter(header.method, header.base, unpack(pages, layout), header.meta)


def check_layout(header: Header, path: Path) -> Any:
    """The header's `PageLayout`, if it fills the pages that the header tells of.

    Raises:
        PreftError: it does not.
    """
    layout = header.layout
    if (layout.num_pages, layout.page_elements) != (header.num_pages, header.page_elements):
        raise PreftError(
            f"the header of {path} is damaged: its modules do not fill its pages; convert the adapter again"
        )
    return layout


def _truncated(path: Path | str, size: int, expected: str) -> str:
    return f"{path} is truncated or half-written: it has {size} bytes and {expected}; convert the adapter again"
