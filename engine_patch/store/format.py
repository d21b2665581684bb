"""The `.preft` container's first bytes: a safetensors header whose metadata describes the adapter. No torch here.

    8 bytes    length of the JSON that follows (little endian), as in every safetensors file
    JSON       {"__metadata__": {"format": "preft", "version": "1", "adapter": <JSON>, "adapter_crc32": <hex>},
                "pages": {"dtype": ..., "shape": [num_pages, page_elements], "data_offsets": [0, num_bytes]}}
    pages      starts at a multiple of 4096 bytes (the JSON is padded with spaces), so that it can be mapped as it is

Listing a store of ten thousand adapters reads only this, so parsing stays in plain Python and in one pass.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.store.layout import ModuleLayout, join_module, split_module

FORMAT_VERSION = 1
SUFFIX = ".preft"
ALIGNMENT = 4096
MAX_HEADER = 100_000_000  # the safetensors format's own limit

SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

Group = tuple[str, int, int, int, float, tuple[str, ...]]
"""Modules that differ by their layer only: (suffix, in_features, out_features, rank, scaling, layers)."""


T = TypeVar("T")


@lru_cache(maxsize=256)
def _shared(value: T) -> T:
    """The first object equal to `value`: ten thousand headers of one kind share theirs, which spares memory and time."""
    return value


@dataclass(frozen=True)
class Header:
    """All that is known about a `.preft` file without reading its tensors."""

    method: str
    rank: int
    """The largest rank of its modules."""
    digest: str
    """Content digest of the adapter, see `Adapter.digest`."""
    base: BaseFingerprint
    dtype: str
    meta: dict[str, Any]
    groups: tuple[Group, ...]
    num_pages: int
    page_elements: int
    pages_crc32: str
    """Checksum of all bytes of the pages, padding included."""
    num_bytes: int = 0
    """Bytes of the pages."""
    data_start: int = 0
    """Where the pages begin in the file, in bytes."""

    @cached_property
    def modules(self) -> dict[str, ModuleLayout]:
        """Shape, rank and scaling by module name. Expanded on first use: most readers of a header need none of it."""
        return {
            join_module(layer, suffix): ModuleLayout(rank, in_features, out_features, scaling)
            for suffix, in_features, out_features, rank, scaling, layers in self.groups
            for layer in layers
        }


def group_modules(modules: Mapping[str, ModuleLayout]) -> tuple[Group, ...]:
    """The compact form of `modules`: a uniform adapter takes one group a target module, not one a layer and module."""
    groups: dict[tuple[str, int, int, int, float], list[str]] = {}
    for name in sorted(modules):
        layer, suffix = split_module(name)
        m = modules[name]
        groups.setdefault((suffix, m.in_features, m.out_features, m.rank, m.scaling), []).append(layer)
    return tuple((*key, tuple(layers)) for key, layers in groups.items())


def encode_header(header: Header) -> bytes:
    """The file's first `data_start` bytes, the same for the same header."""
    layers = sorted({layer for group in header.groups for layer in group[5]})
    number = {layer: index for index, layer in enumerate(layers)}
    adapter = {
        "method": header.method,
        "rank": header.rank,
        "digest": header.digest,
        "base": header.base.to_dict(),
        "dtype": header.dtype,
        "layers": layers,
        # null stands for all layers: the usual adapter's header stays small and quick to parse.
        "modules": [
            [*group[:5], None if len(group[5]) == len(layers) else [number[layer] for layer in group[5]]]
            for group in header.groups
        ],
        "pages_crc32": header.pages_crc32,
        "meta": header.meta,
    }
    text = json.dumps(adapter, sort_keys=True, separators=(",", ":"))
    table = {
        "__metadata__": {
            "format": "preft",
            "version": str(FORMAT_VERSION),
            "adapter": text,
            "adapter_crc32": f"{zlib.crc32(text.encode()):08x}",
        },
        "pages": {
            "dtype": SAFETENSORS_DTYPES[header.dtype],
            "shape": [header.num_pages, header.page_elements],
            "data_offsets": [0, header.num_bytes],
        },
    }
    encoded = json.dumps(table, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    return struct.pack("<Q", len(encoded)) + encoded


def decode_header(encoded: bytes, where: str) -> Header:
    """Parse the JSON part of a file (without the 8 length bytes); `where` names the file in errors.

    Raises:
        PreftError: not a `.preft` file, another version, or a damaged header.
    """
    try:
        table = json.loads(encoded)
        metadata = table["__metadata__"]
        if metadata["format"] != "preft":
            raise KeyError("format")
        version = int(metadata["version"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PreftError(
            f"{where} is not a {SUFFIX} file, or its header is damaged; convert the adapter again"
        ) from error
    if version != FORMAT_VERSION:
        age = "a newer" if version > FORMAT_VERSION else "an older"
        remedy = "update preft" if version > FORMAT_VERSION else "convert the adapter again"
        raise PreftError(
            f"{where} was written by {age} preft: version {version}, this one reads {FORMAT_VERSION}; {remedy}"
        )
    try:
        return _parse(table["pages"], metadata, len(encoded))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise PreftError(f"the header of {where} is damaged; convert the adapter again") from error


def _parse(pages: dict[str, Any], metadata: dict[str, str], header_bytes: int) -> Header:
    text = metadata["adapter"]
    if f"{zlib.crc32(text.encode()):08x}" != metadata["adapter_crc32"]:
        raise ValueError("checksum")
    adapter = json.loads(text)
    layers = tuple(adapter["layers"])
    num_pages, page_elements = pages["shape"]
    begin, end = pages["data_offsets"]
    itemsize = 4 if adapter["dtype"] == "float32" else 2
    if pages["dtype"] != SAFETENSORS_DTYPES[adapter["dtype"]] or begin != 0:
        raise ValueError("dtype or offsets")
    if end != num_pages * page_elements * itemsize:
        raise ValueError("shape")
    return Header(
        method=adapter["method"],
        rank=adapter["rank"],
        digest=adapter["digest"],
        base=_shared(BaseFingerprint.from_dict(adapter["base"])),
        dtype=adapter["dtype"],
        meta=adapter["meta"],
        groups=_shared(
            tuple(
                (*m[:5], layers if m[5] is None else tuple(layers[index] for index in m[5])) for m in adapter["modules"]
            )
        ),
        num_pages=num_pages,
        page_elements=page_elements,
        pages_crc32=adapter["pages_crc32"],
        num_bytes=end,
        data_start=8 + header_bytes,
    )
