"""Published shapes without their weights: the engine's layers as data, and adapters for them in both formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine_patch.adapter import DTYPES, Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.pool.layers import EngineLayers, Slice
from engine_patch.pool.limits import Limits
from engine_patch.ref import AdapterRef
from engine_patch.store.file import read_header, write_adapter
from preft_cli.adapters.peft_out import write_peft
from preft_cli.models import modules_of, resolve

SCALING = 1.0
"""vLLM multiplies B by any other one when it loads an adapter: we do not count that against it."""


@dataclass(frozen=True)
class Shape:
    """A base model as far as adapters know it."""

    name: str
    config: Any
    """Its Transformers config."""
    base: BaseFingerprint
    modules: dict[str, tuple[int, int]]
    """(in, out) features of every linear layer of the decoder."""

    @classmethod
    def published(cls, name: str) -> Shape:
        """A key of `RANDOM_SHAPES`."""
        base = resolve(f"random:{name}")
        return cls(name, base.hf_config, base.fingerprint, modules_of(base).linear)

    def layers(self) -> EngineLayers:
        """As an engine without tensor parallelism has them."""
        slices = [Slice(name, *sizes, columns=None, rows=None) for name, sizes in self.modules.items()]
        return EngineLayers([(None, slices)], self.base)

    def limits(self, max_rank: int, dtype: torch.dtype, device_bytes: int, host_bytes: int) -> Limits:
        """Of an engine with these pools."""
        return Limits(
            base=self.base.to_dict(),
            max_rank=max_rank,
            modules=self.layers().sizes(),
            itemsize=dtype.itemsize,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
        )


def random_adapter(
    base: BaseFingerprint,
    modules: Mapping[str, tuple[int, int]],
    ranks: Mapping[str, int] | int,
    seed: int,
    dtype: str = "bfloat16",
) -> Adapter:
    """No weight is zero on purpose; one rank for all modules, or one for each."""
    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(0.01).to(DTYPES[dtype])

    def pair(name: str, width: int, out: int) -> LowRankPair:
        rank = ranks if isinstance(ranks, int) else ranks[name]
        return LowRankPair(weights(rank, width), weights(out, rank), SCALING)

    return Adapter("lorap", base, {name: pair(name, *sizes) for name, sizes in modules.items()})


def write_both(adapters: Iterable[Adapter], folder: Path) -> tuple[list[AdapterRef], list[Path]]:
    """Each adapter as a `.preft` file and as the PEFT folder that vLLM reads."""
    refs, folders = [], []
    for index, adapter in enumerate(adapters):
        refs.append(write_ref(folder / f"a{index}.preft", adapter))
        folders.append(folder / f"a{index}")
        write_peft(folders[-1], replace(adapter, method="lora"))  # vLLM knows no prefill-only adapters
    return refs, folders


def write_ref(path: Path, adapter: Adapter) -> AdapterRef:
    """Write the file and name its content."""
    write_adapter(path, adapter)
    header = read_header(path)
    return AdapterRef(path, header.method, header.digest)


def weight_bytes(adapter: Adapter) -> int:
    """Of A and B of every module at its own rank."""
    return sum(t.numel() * t.element_size() for pair in adapter.pairs.values() for t in (pair.a, pair.b))
