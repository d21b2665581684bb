"""Adapters made for one arm: distinct files of small random weights, the same weights in every arm."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from preft_cli.bench.arms import ArmKind
from preft_cli.bench.plan import BenchPlan
from preft_cli.bench.results import AdapterSet
from preft_cli.errors import UserError
from preft_cli.models import BaseModel, linear_modules

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
    modules = linear_modules(base)
    paths, digests = [], []
    for index in range(plan.num_adapters):
        # The same weights whatever the method, so that arms differ in how they serve and in nothing else.
        adapter = random_adapter(plan, base, modules, index, TORCH_DTYPES[dtype])
        digests.append(adapter.digest())
        paths.append(write(replace(adapter, method=kind.method or "lora"), kind, folder / f"adapter-{index:05d}"))
        on_file()
    check_distinct(paths, digests)
    return paths, AdapterSet(
        format=kind.adapters,
        count=len(paths),
        rank=plan.rank,
        bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        weights_digest=hashlib.sha256("\n".join(digests).encode()).hexdigest(),
    )


def random_adapter(
    plan: BenchPlan, base: BaseModel, modules: dict[str, tuple[int, int]], index: int, dtype: str
) -> Adapter:
    """Adapter `index` of the plan's seed: A `[rank, in_features]` and B `[out_features, rank]` for each module."""
    import torch

    from engine_patch.adapter import Adapter, LowRankPair

    generator = torch.Generator().manual_seed((plan.seed << 20) + index)

    def weights(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * WEIGHT_SCALE).to(getattr(torch, dtype))

    pairs = {
        name: LowRankPair(a=weights(plan.rank, size_in), b=weights(size_out, plan.rank), scaling=1.0)
        for name, (size_in, size_out) in modules.items()
    }
    return Adapter(method="lora", base=base.fingerprint, pairs=pairs, meta={"source": "preft bench"})


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
