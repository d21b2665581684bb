"""One `.preft` file: written atomically, its header read cheaply, its content verified when loaded."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from engine_patch.errors import PreftError
from engine_patch.store.atomic import atomic_write
from engine_patch.store.folder import adapter_name, check_name
from engine_patch.store.format import MAX_HEADER, SUFFIX, Header, decode_header, encode_header, group_modules
from engine_patch.store.layout import ModuleLayout, plan_pages

if TYPE_CHECKING:
    from engine_patch.adapter import Adapter


def write_adapter(path: Path, adapter: Adapter) -> Header:
    """Write `adapter` to `path` (`<folder>/NAME.preft`); a file that is there is replaced in one step.

    Raises:
        PreftError: a file name that is no adapter name.
        OSError: the disk is full, the folder missing or read-only; nothing is left behind.
    """
    from engine_patch.adapter import tensor_bytes
    from engine_patch.store.pages import pack

    if path.suffix != SUFFIX:
        raise PreftError(f"{path}: an adapter file is called NAME{SUFFIX}")
    check_name(adapter_name(path))
    modules = {
        name: ModuleLayout(pair.rank, pair.in_features, pair.out_features, pair.scaling)
        for name, pair in adapter.loras.items()
    }
    layout = plan_pages(modules)
    pages = tensor_bytes(pack(adapter.loras, layout))
    header = Header(
        method=adapter.method,
        rank=adapter.rank,
        digest=adapter.digest(),
        base=adapter.base,
        dtype=adapter.dtype,
        meta=adapter.meta,
        groups=group_modules(modules),
        num_pages=layout.num_pages,
        page_elements=layout.page_elements,
        pages_crc32=f"{zlib.crc32(pages):08x}",
        num_bytes=len(pages),
    )
    encoded = encode_header(header)
    atomic_write(path, [encoded, pages])
    return decode_header(encoded[8:], str(path))


def read_header(path: Path) -> Header:
    """Read and check only the header of `path`; neither torch nor the tensors are touched.

    Raises:
        PreftError: not a `.preft` file, another format version, an unknown method, a damaged header, or a file whose
            size is not what its header says (truncated or half-written).
    """
    from engine_patch.rule import METHODS

    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            # The size decides first: a garbage length must not make us allocate it.
            if length == 0 or length > MAX_HEADER:
                raise PreftError(f"{path} is not a {SUFFIX} file ({size} bytes); convert the adapter again")
            encoded = file.read(length) if 8 + length <= size else b""
    except OSError as error:
        raise PreftError(f"cannot read {path}: {error.strerror}") from error
    if len(encoded) != length:
        raise PreftError(_truncated(path, size, f"its header alone needs {8 + length}"))
    header = decode_header(encoded, str(path))
    expected = header.data_start + header.num_bytes
    if size != expected:
        raise PreftError(_truncated(path, size, f"its header says {expected}"))
    if header.method not in METHODS:
        raise PreftError(f"{path}: unknown adapter method {header.method!r}; known: {', '.join(sorted(METHODS))}")
    return header


def read_adapter(path: Path) -> Adapter:
    """Load `path` and verify all of it.

    Raises:
        PreftError: whatever `read_header` raises, and any damage to the tensors: checksum or content digest differ.
    """
    import torch

    from engine_patch.adapter import DTYPES, Adapter
    from engine_patch.store.pages import unpack

    header = read_header(path)
    data = bytearray(header.num_bytes)
    with path.open("rb", buffering=0) as file:
        file.seek(header.data_start)
        read = 0
        while read < header.num_bytes and (count := file.readinto(memoryview(data)[read:])):
            read += count
    # Padding is no part of the digest but the engine computes with it: the checksum covers every byte.
    if f"{zlib.crc32(data):08x}" != header.pages_crc32:
        raise PreftError(f"{path} is damaged: its weights do not match their checksum; convert the adapter again")
    layout = plan_pages(header.modules)
    if (layout.num_pages, layout.page_elements) != (header.num_pages, header.page_elements):
        raise PreftError(
            f"the header of {path} is damaged: its modules do not fill its pages; convert the adapter again"
        )
    pages = torch.frombuffer(data, dtype=DTYPES[header.dtype]).view(layout.num_pages, layout.page_elements)
    adapter = Adapter(header.method, header.base, unpack(pages, layout, header.modules), header.meta)
    if (digest := adapter.digest()) != header.digest:
        raise PreftError(f"{path} is damaged: content digest {digest} where its header says {header.digest}")
    return adapter


def _truncated(path: Path, size: int, expected: str) -> str:
    return f"{path} is truncated or half-written: it has {size} bytes and {expected}; convert the adapter again"
