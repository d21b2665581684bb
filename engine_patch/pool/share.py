"""From a file's pages to the bytes that one worker keeps and copies to its device."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from engine_patch.adapter import DTYPES
from engine_patch.kernels.reference import scale_to_bits
from engine_patch.pool.layers import EngineLayers, Slice
from engine_patch.pool.limits import Limits
from engine_patch.residual import is_stream
from engine_patch.store.file import Each, read_pages
from engine_patch.store.format import Group, Header, layout_of
from engine_patch.store.layout import PAGE_BYTES, PageLayout
from engine_patch.store.pages import views

SCRATCH_KEPT = 256 << 20
"""Bytes that each loading thread keeps to read files into which a share is cut out of."""

KINDS_REMEMBERED = 256
"""Kinds of adapters whose shares are shared; then it begins anew. A store mostly has one kind for each rank."""


@dataclass(frozen=True, eq=False)
class Share:
    """What one worker keeps of all adapters of one kind (same modules, ranks, scalings and file dtype)."""

    layout: PageLayout
    """Of the worker's own bytes."""
    plain: bool
    """Whether they are the file's bytes as they are: no tensor parallelism, and the engine's dtype."""
    rows: torch.Tensor
    """`[num_slices, 4]` int64: A's and B's offset (in elements, from the adapter's first), rank, bits of the float32 scale."""

    @property
    def num_bytes(self) -> int:
        """Of the worker's bytes."""
        return self.layout.num_pages * PAGE_BYTES

    @cached_property
    def adapts_streams(self) -> bool:
        """Whether it has a part for residual streams."""
        return any(map(is_stream, self.layout.blocks))

    @cached_property
    def adapts_linear(self) -> bool:
        """Whether it has a part for linear layers."""
        return not all(map(is_stream, self.layout.blocks))


class Sharer:
    """Makes the shares of one worker, each kind once."""

    def __init__(self, layers: EngineLayers, limits: Limits, dtype: torch.dtype) -> None:
        self.limits = limits
        self._slices, self._dtype = layers.slices, dtype
        self._made: dict[tuple[tuple[Group, ...], str], Share] = {}
        self._threads = threading.local()

    def share(self, header: Header) -> Share:
        """The share of the adapter that `header` describes, which must fit (see `Limits.check`)."""
        key = (header.groups, header.dtype)
        if len(self._made) >= KINDS_REMEMBERED:
            self._made.clear()
        if key not in self._made:
            layout = self.limits.layout(header.groups)
            whole = all(part.columns is None and part.rows is None for part in self._slices.values())
            plain = whole and DTYPES[header.dtype] == self._dtype
            self._made[key] = Share(layout, plain, table_rows(layout, self._slices))
        return self._made[key]

    def load(self, path: Path, header: Header, into: torch.Tensor, each: Each) -> None:
        """Read and verify `path`, and put this worker's share into `into`, uint8 `[share.num_bytes]`.

        Raises:
            PreftError: as `read_pages` does.
        """
        share = self.share(header)
        if share.plain:
            read_pages(path, header, memoryview(into.numpy()), each)  # type: ignore[arg-type]
            return
        data = self._scratch(header.num_bytes)
        read_pages(path, header, memoryview(data.numpy()), each)  # type: ignore[arg-type]
        whole = data.view(DTYPES[header.dtype])
        mine = into.view(self._dtype)
        for name, block in layout_of(header.groups, DTYPES[header.dtype].itemsize).blocks.items():
            part = self._slices[name]
            to, source = views(mine, share.layout.blocks[name]), views(whole, block)
            to.a.copy_(source.a if part.columns is None else source.a[:, part.columns])
            to.b.copy_(source.b if part.rows is None else source.b[:, part.rows])
            if to.bias is not None and source.bias is not None:
                to.bias.copy_(source.bias)

    def _scratch(self, num_bytes: int) -> torch.Tensor:
        """Memory of this thread, uint8 `[num_bytes]`, used again: new pages cost more time than what is read into them."""
        held: torch.Tensor | None = getattr(self._threads, "scratch", None)
        if held is None or len(held) < num_bytes:
            held = torch.empty(num_bytes, dtype=torch.uint8)
            if num_bytes <= SCRATCH_KEPT:
                self._threads.scratch = held
        return held[:num_bytes]


def table_rows(layout: PageLayout, slices: dict[str, Slice]) -> torch.Tensor:
    """The rows of the table of weights for an adapter that lies at offset 0; rank 0 where it adapts nothing."""
    rows = torch.zeros(len(slices), 4, dtype=torch.int64)
    for index, name in enumerate(slices):
        if block := layout.blocks.get(name):
            rows[index] = torch.tensor(
                [block.a_offset, block.b_offset, block.module.rank, scale_to_bits(block.module.scaling)]
            )
    return rows
