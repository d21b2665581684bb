"""An adapter in memory: what training, conversion, the store and the engine pass to each other."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.rule import METHODS

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class LoraPair:
    """The low-rank update of one linear layer: `y += scaling * (x @ a.T) @ b.T`."""

    a: torch.Tensor
    """[rank, in_features]"""
    b: torch.Tensor
    """[out_features, rank]"""
    scaling: float
    """alpha / rank, or alpha / sqrt(rank) for rsLoRA; never folded into the tensors."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def in_features(self) -> int:
        return self.a.shape[1]

    @property
    def out_features(self) -> int:
        return self.b.shape[0]


@dataclass(frozen=True, eq=False)
class Adapter:
    """LoRA pairs by module name (plain Hugging Face names, such as `model.layers.0.self_attn.q_proj`).

    Raises:
        PreftError: for an unknown method, no module at all, shapes that do not belong together, or mixed dtypes.
    """

    method: str
    base: BaseFingerprint
    loras: Mapping[str, LoraPair]
    meta: dict[str, Any] = field(default_factory=dict)
    """Where it comes from (JSON values): chat template digest, steps, PEFT config ... Not part of the digest."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise PreftError(f"unknown adapter method {self.method!r}; known: {', '.join(sorted(METHODS))}")
        if not self.loras:
            raise PreftError("the adapter holds no LoRA weights")
        for name, pair in self.loras.items():
            if pair.a.ndim != 2 or pair.b.ndim != 2 or pair.a.shape[0] != pair.b.shape[1] or pair.rank == 0:
                raise PreftError(
                    f"{name}: lora_A has shape {list(pair.a.shape)} and lora_B {list(pair.b.shape)}; "
                    "expected [rank, in_features] and [out_features, rank]"
                )
        dtypes = {str(t.dtype).removeprefix("torch.") for pair in self.loras.values() for t in (pair.a, pair.b)}
        if len(dtypes) > 1 or not dtypes <= DTYPES.keys():
            raise PreftError(
                f"the adapter's tensors are {' and '.join(sorted(dtypes))}; "
                f"save them all in one type of {', '.join(DTYPES)}"
            )

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(pair.rank for pair in self.loras.values())

    @property
    def dtype(self) -> str:
        """The one dtype of its tensors: float32, float16 or bfloat16."""
        return str(next(iter(self.loras.values())).a.dtype).removeprefix("torch.")

    def to(self, dtype: str) -> Adapter:
        """The adapter with A and B in `dtype`, a key of `DTYPES`; itself if they are. Scalings stay as they are."""
        if dtype == self.dtype:
            return self
        kind = DTYPES[dtype]
        loras = {name: LoraPair(pair.a.to(kind), pair.b.to(kind), pair.scaling) for name, pair in self.loras.items()}
        return Adapter(self.method, self.base, loras, self.meta)

    def digest(self) -> str:
        """sha256 (hex) of what the adapter computes: method, module names, scalings, shapes, dtype, tensor bytes.

        Neither the order of `loras`, nor `meta`, nor the base model, nor a file's name or layout matter: caches are
        keyed by this, and equal weights may share.
        """
        digest = hashlib.sha256()
        digest.update(json.dumps(["preft-adapter", self.method, self.dtype]).encode())
        for name in sorted(self.loras):
            pair = self.loras[name]
            digest.update(json.dumps([name, list(pair.a.shape), list(pair.b.shape)]).encode())
            digest.update(struct.pack("<d", pair.scaling))
            digest.update(tensor_bytes(pair.a))
            digest.update(tensor_bytes(pair.b))
        return digest.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's raw bytes in row-major order; copies only what is not contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stubs do not declare the buffer protocol
