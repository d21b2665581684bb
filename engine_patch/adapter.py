"""An adapter in memory: what training, conversion, the store and the engine pass to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.residual import is_stream
from engine_patch.rule import METHODS, parts

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class LowRankPair:
    """`y += scaling * (x @ a.T + bias) @ b.T`: a LoRA of a linear layer, or a DiReFT intervention.

    The latter acts on the residual stream, so that y is x, and `W1 = a`, `W2 = b.T`, `b = bias`, with a scaling of 1.
    """

    a: torch.Tensor
    """[rank, in_features]"""
    b: torch.Tensor
    """[out_features, rank]"""
    scaling: float
    """alpha / rank, or alpha / sqrt(rank) for rsLoRA; never folded into the tensors."""
    bias: torch.Tensor | None = None
    """[rank]; interventions have one."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """a, b and, if there is one, bias."""
        found = {"a": self.a, "b": self.b}
        return found if self.bias is None else {**found, "bias": self.bias}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LowRankPair:
        """The pair with every tensor changed."""
        bias = None if self.bias is None else change(self.bias)
        return LowRankPair(change(self.a), change(self.b), self.scaling, bias)

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
    """Low-rank pairs by name.

    LoRAs go by the plain Hugging Face names of linear layers, such as `model.layers.0.self_attn.q_proj`, interventions by
    those of residual streams, such as `model.layers.0.residual` (see `engine_patch.residual`).

    Raises:
        PreftError: for an unknown method, parts that are not the method's, shapes that do not belong together, or mixed dtypes.
    """

    method: str
    base: BaseFingerprint
    pairs: Mapping[str, LowRankPair]
    meta: dict[str, Any] = field(default_factory=dict)
    """Where it comes from (JSON values): chat template digest, steps, PEFT config ... Not part of the digest."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise PreftError(f"unknown adapter method {self.method!r}; known: {', '.join(sorted(METHODS))}")
        self._check_parts()
        for name, pair in self.pairs.items():
            _check_shapes(name, pair)
        dtypes = {str(t.dtype).removeprefix("torch.") for pair in self.pairs.values() for t in pair.tensors.values()}
        if len(dtypes) > 1 or not dtypes <= DTYPES.keys():
            raise PreftError(
                f"the adapter's tensors are {' and '.join(sorted(dtypes))}; "
                f"save them all in one type of {', '.join(DTYPES)}"
            )

    def _check_parts(self) -> None:
        wanted, found = parts(self.method), {"direft" if is_stream(name) else "lora" for name in self.pairs}
        weights = {"lora": "LoRA weights", "direft": "DiReFT interventions"}
        if missing := sorted(wanted - found):
            raise PreftError(f"the adapter holds no {' and no '.join(weights[part] for part in missing)}")
        if extra := found - wanted:
            both = "+".join(sorted((*wanted, *extra), reverse=True))
            raise PreftError(
                f"the adapter holds {weights[extra.pop()]}, which a {self.method} adapter has not ({both}?)"
            )

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def dtype(self) -> str:
        """The one dtype of its tensors: float32, float16 or bfloat16."""
        return str(next(iter(self.pairs.values())).a.dtype).removeprefix("torch.")

    def to(self, dtype: str) -> Adapter:
        """The adapter with its tensors cast to `dtype`; itself if nothing changes."""
        if dtype == self.dtype:
            return self
        pairs = {name: pair.map(lambda tensor: tensor.to(DTYPES[dtype])) for name, pair in self.pairs.items()}
        return Adapter(self.method, self.base, pairs, self.meta)

    def digest(self) -> str:
        """The content digest (see `engine_patch.store.digest`), equal to that of the `.preft` file of this adapter."""
        from engine_patch.store.file import encode

        return encode(self)[0].digest


def _check_shapes(name: str, pair: LowRankPair) -> None:
    a, b = list(pair.a.shape), list(pair.b.shape)
    bias = None if pair.bias is None else list(pair.bias.shape)
    if not is_stream(name):
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] == 0 or bias is not None:
            raise PreftError(
                f"{name}: lora_A has shape {a} and lora_B {b}; expected [rank, in_features] and [out_features, rank]"
                + ("" if bias is None else ", and no bias")
            )
    elif len(a) != 2 or b != a[::-1] or bias != a[:1] or a[0] == 0 or pair.scaling != 1.0:
        raise PreftError(
            f"{name}: W1 has shape {a}, W2 {b[::-1]}, b {bias}, and the scaling is {pair.scaling}; expected [rank, hidden]"
            " twice, [rank], and 1"
        )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's raw bytes in row-major order; copies only what is not contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stubs do not declare the buffer protocol
