"""Small random weights for adapters, quickly made."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import TYPE_CHECKING

from engine_patch.base_model import BaseFingerprint
from engine_patch.residual import is_stream
from engine_patch.rule import parts
from preft_cli.models.modules import Modules

if TYPE_CHECKING:
    import torch

    from engine_patch.adapter import Adapter

WEIGHT_SCALE = 0.01
"""Standard deviation of the weights: far from zero, so that nothing is skipped, and too small to blow up activations."""

POOL_ELEMENTS = 1 << 25
"""Random numbers that adapters take their weights from. Drawing each anew would take longer than writing the files."""


def random_adapter(base: BaseFingerprint, modules: Modules, method: str, rank: int, seed: int, dtype: str) -> Adapter:
    """Small random weights for every module that `method` acts on: windows into one pool of them, drawn from `seed`."""
    import torch

    from engine_patch.adapter import Adapter, LowRankPair

    generator = torch.Generator().manual_seed(seed)
    pool = weight_pool(dtype)

    def weights(*shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        start = int(torch.randint(len(pool) - size, (1,), generator=generator))
        return pool[start : start + size].reshape(shape).clone()  # safetensors refuses tensors that share memory

    shapes = (modules.linear if "lora" in parts(method) else {}) | (
        modules.streams if "direft" in parts(method) else {}
    )
    pairs = {
        name: LowRankPair(
            a=weights(rank, size_in),
            b=weights(size_out, rank),
            scaling=1.0,
            bias=weights(rank) if is_stream(name) else None,
        )
        for name, (size_in, size_out) in shapes.items()
    }
    return Adapter(method=method, base=base, pairs=pairs, meta={"source": "preft bench"})


@lru_cache(maxsize=1)
def weight_pool(dtype: str) -> torch.Tensor:
    """The random numbers, the same in every process."""
    import torch

    drawn = torch.randn(POOL_ELEMENTS, generator=torch.Generator().manual_seed(0))
    return (drawn * WEIGHT_SCALE).to(getattr(torch, dtype))


def weights_digest(adapter: Adapter) -> str:
    """SHA-256 of the weights under their names."""
    from engine_patch.adapter import tensor_bytes

    digest = hashlib.sha256()
    for name, pair in adapter.pairs.items():
        for part, tensor in pair.tensors.items():
            digest.update(json.dumps([name, part, list(tensor.shape)]).encode())
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
