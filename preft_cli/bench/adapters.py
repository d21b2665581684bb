"""Adapters made for one arm: distinct files of small random weights, the same weights in every arm."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine_patch.residual import is_stream
from engine_patch.rule import parts
from preft_cli.bench.arms import ArmKind
from preft_cli.bench.plan import BenchPlan
from preft_cli.bench.results import AdapterSet
from preft_cli.errors import UserError
from preft_cli.models import BaseModel
from preft_cli.models.modules import Modules, modules_of

if TYPE_CHECKING:
    import torch

    from engine_patch.adapter import Adapter

WEIGHT_SCALE = 0.01
"""Standard deviation of A and B: far from zero, so that nothing is skipped, and too small to blow up activations."""

TORCH_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "auto": "bfloat16"}


def make_adapters(
    kind: ArmKind,
    plan: BenchPlan,
    base: BaseModel,
    folder: Path,
    dtype: str,
    on_file: Callable[[], None] = lambda: None,
) -> tuple[list[Path], AdapterSet]:
    """Write the arm's adapters to `folder` and describe them.

    Args:
        kind: the arm, which says in what form and with what method.
        dtype: the config's name of the weights' type.
        on_file: called after each file.

    Raises:
        UserError: if two adapters are the same: caches would flatter the arm.
    """
    modules = modules_of(base, plan.residual_stream)
    paths, digests = [], []
    for index in range(plan.num_adapters):
        adapter = random_adapter(
            base, modules, kind.method or "lora", plan.rank, (plan.seed << 20) + index, TORCH_DTYPES[dtype]
        )
        # Without the method: lora and lorap have the same weights, and differ in how they serve and in nothing else.
        digests.append(replace(adapter, method=adapter.method.replace("p", "")).digest())
        paths.append(write(adapter, kind, folder / f"adapter-{index:05d}"))
        on_file()
    check_distinct(paths, digests)
    return paths, AdapterSet(
        format=kind.adapters,
        count=len(paths),
        rank=plan.rank,
        bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        weights_digest=hashlib.sha256("\n".join(digests).encode()).hexdigest(),
    )


def random_adapter(base: BaseModel, modules: Modules, method: str, rank: int, seed: int, dtype: str) -> Adapter:
    """Small random weights for every module that `method` acts on."""
    import torch

    from engine_patch.adapter import Adapter, LowRankPair

    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * WEIGHT_SCALE).to(getattr(torch, dtype))

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
    return Adapter(method=method, base=base.fingerprint, pairs=pairs, meta={"source": "preft bench"})


def write(adapter: Adapter, kind: ArmKind, stem: Path) -> Path:
    """Write one adapter in the arm's form; returns the path of the file or folder."""
    if kind.adapters == "preft":
        from engine_patch.store.file import write_adapter

        path = stem.with_name(f"{stem.name}.preft")
        write_adapter(path, adapter)
        return path
    from preft_cli.adapters.peft_out import write_peft

    write_peft(stem, adapter)
    return stem


def check_distinct(paths: list[Path], digests: list[str]) -> None:
    """Refuse adapters that share a file or weights.

    Raises:
        UserError: names the first two that do.
    """
    for what, keys in (("file", [str(path.resolve()) for path in paths]), ("weights", digests)):
        first: dict[str, int] = {}
        for index, key in enumerate(keys):
            if key in first:
                raise UserError(
                    f"bench: adapters {first[key]} and {index} share their {what}; each must be its own file"
                )
            first[key] = index
