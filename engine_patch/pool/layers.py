"""What this engine can serve, and this worker's share of it: told by vLLM's own wrapped layers.

With tensor parallelism each worker computes a part of every layer, and needs that part of A or B. Which part is asked of
vLLM's own slicing functions, so that the share is theirs by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from engine_patch.base_model import BaseFingerprint
from engine_patch.pool.limits import Sizes
from engine_patch.pool.streams import ResidualStream, hook_streams

Part = slice | torch.Tensor | None
"""Positions that a share takes of a dimension: a run of them, or int64 `[share]`; None: all."""


@dataclass(frozen=True, eq=False)
class Slice:
    """One module of the model: all of a wrapped layer, one part of a fused one, or a residual stream."""

    module: str
    in_features: int
    out_features: int
    """As on one device."""
    columns: Part
    """Input features that this worker computes."""
    rows: Part
    """Output features that this worker computes."""

    @property
    def local_in(self) -> int:
        """Input features on this worker."""
        return size_of(self.columns, self.in_features)

    @property
    def local_out(self) -> int:
        """Output features on this worker."""
        return size_of(self.rows, self.out_features)


@dataclass(frozen=True, eq=False)
class EngineLayers:
    """The linear layers that vLLM's adapter manager wraps, in the order of the model, and then the residual streams."""

    layers: list[tuple[Any, list[Slice]]]
    """Each wrapped layer, or `ResidualStream`, with its parts."""
    base: BaseFingerprint

    @classmethod
    def of(cls, manager: Any, declared: bool = False) -> EngineLayers:
        """Look into vLLM's `LoRAModelManager`, and hook its model's decoder blocks.

        Args:
            manager: with its layers wrapped already.
            declared: see `hook_streams`.
        """
        layers: list[tuple[Any, list[Slice]]] = []
        for name, layer in manager.modules.items():
            if layer.punica_wrapper is not kernels_of(manager):
                continue
            parts = manager.packed_modules.get(name) or [name]
            shapes = part_shapes(layer.base_layer, len(parts))
            if len(shapes) == len(parts):
                shares = part_shares(layer, shapes)
                slices = [Slice(*one, *share) for one, share in zip(_named(parts, shapes), shares, strict=True)]
                layers.append((layer, slices))
        for name, stream in hook_streams(manager, declared).items():
            layers.append((stream, [Slice(name, stream.width, stream.width, columns=None, rows=None)]))
        return cls(layers, BaseFingerprint.from_hf_config(manager.model.config))

    @property
    def linear(self) -> list[Any]:
        """The wrapped linear layers."""
        return [layer for layer, _ in self.layers if not isinstance(layer, ResidualStream)]

    @cached_property
    def slices(self) -> dict[str, Slice]:
        """Every module, in the order of the table of weights."""
        return {part.module: part for _, parts in self.layers for part in parts}

    def sizes(self) -> dict[str, Sizes]:
        """Of every module, in the same order."""
        return {
            name: Sizes(whole=(part.in_features, part.out_features), local=(part.local_in, part.local_out))
            for name, part in self.slices.items()
        }


def kernels_of(manager: Any) -> Any:
    """What computes with a `LoRAModelManager`'s adapters. Towers of a multimodal model have their own, and are not adapted."""
    from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY

    return manager._get_punica_wrapper(
        manager.mm_mapping.language_model[0] if manager.supports_mm else DEFAULT_LANGUAGE_WRAPPER_KEY
    )


def _named(parts: list[str], shapes: list[tuple[int, int]]) -> list[tuple[str, int, int]]:
    return [(name, *shape) for name, shape in zip(parts, shapes, strict=True)]


def part_shapes(base: Any, num_parts: int) -> list[tuple[int, int]]:
    """(in, out) features of each part of a linear layer, as on one device; of no part if it is none (an embedding)."""
    if not hasattr(base, "output_size"):
        return []
    if num_parts == 1:
        return [(base.input_size, base.output_size)]
    if hasattr(base, "total_num_kv_heads"):  # `output_sizes` counts key and value heads once for each device
        kv_heads, v_size = base.total_num_kv_heads, getattr(base, "v_head_size", base.head_size)
        sizes = [base.total_num_heads * base.head_size, kv_heads * base.head_size, kv_heads * v_size]
    else:
        sizes = base.output_sizes
    return [(base.input_size, size) for size in sizes]


def part_shares(layer: Any, shapes: list[tuple[int, int]]) -> list[tuple[Part, Part]]:
    """Which columns of A and rows of B this worker takes of each part: what vLLM's slicing leaves of the numbers 0, 1, ..."""
    if layer.tp_size == 1:
        return [(None, None)] * len(shapes)
    a: Any = [torch.arange(size)[None, :] for size, _ in shapes]
    b: Any = [torch.arange(size)[:, None] for _, size in shapes]
    if layer.n_slices == 1:
        a, b = [layer.slice_lora_a(a[0])], [layer.slice_lora_b(b[0])]
    else:
        a, b = layer.slice_lora_a(a), layer.slice_lora_b(b)
    return [
        (
            None if left.shape[1] == shape[0] else run_of(left[0]),
            None if right.shape[0] == shape[1] else run_of(right[:, 0]),
        )
        for left, right, shape in zip(a, b, shapes, strict=True)
    ]


def run_of(numbers: torch.Tensor) -> slice | torch.Tensor:
    """The numbers, as a slice if they follow each other: to cut out a slice takes a small part of the time.

    They do not where one weight holds several, such as Phi-3's gate and up.
    """
    first, size = int(numbers[0]), len(numbers)
    follow = torch.equal(numbers, torch.arange(first, first + size, device=numbers.device))
    return slice(first, first + size) if follow else numbers.clone()


def size_of(part: Part, whole: int) -> int:
    """Features of a part; None is the whole."""
    if isinstance(part, slice):
        return int(part.stop - part.start)
    return whole if part is None else len(part)
