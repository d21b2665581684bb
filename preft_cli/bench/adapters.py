"""The adapter files of a benchmark: distinct ones, with the same weights in every arm of a kind."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine_patch.base_model import BaseFingerprint
from engine_patch.rule import parts
from preft_cli.bench.arms import ARMS, AdapterFormat
from preft_cli.bench.footprint import ITEM_BYTES
from preft_cli.bench.plan import BenchPlan
from preft_cli.bench.results import AdapterSet
from preft_cli.bench.weights import random_adapter, weights_digest
from preft_cli.convert.workers import cores
from preft_cli.errors import UserError
from preft_cli.models import BaseModel
from preft_cli.models.modules import Modules, modules_of

if TYPE_CHECKING:
    from engine_patch.adapter import Adapter

MANY = 64
"""From so many adapters on, several processes make them."""

MAX_PROCESSES = 16


class Form(NamedTuple):
    """One way to write adapters: arms of the same form share the files."""

    adapters: AdapterFormat
    method: str

    @classmethod
    def of(cls, arm: str) -> Form | None:
        """The form that an arm loads; None for an arm without adapters."""
        kind = ARMS[arm]
        return None if kind.method is None else cls(kind.adapters, kind.method)


class Made(NamedTuple):
    """The adapters of one form."""

    paths: list[Path]
    described: AdapterSet


class Task(NamedTuple):
    """What a process needs to know to make adapters of one form."""

    base: BaseFingerprint
    modules: Modules
    form: Form
    ranks: list[int]
    seed: int
    dtype: str
    folder: Path


def make_adapters(
    plan: BenchPlan, base: BaseModel, forms: list[Form], folder: Path, on_file: Callable[[], None] = lambda: None
) -> dict[Form, Made]:
    """Write `plan.num_adapters` adapters of each form and describe them.

    Args:
        folder: gets a folder for each form.
        on_file: called after each file.

    Raises:
        UserError: if two adapters of a form are the same (caches would flatter the arm), or the disk is too small.
    """
    asked = str(plan.arms[0].engine_args["dtype"])
    dtype = "bfloat16" if asked == "auto" else asked
    modules = modules_of(base, plan.residual_stream)
    tasks = [
        Task(base.fingerprint, modules, form, plan.ranks, plan.seed, dtype, folder / f"{form.adapters}-{form.method}")
        for form in forms
    ]
    require_space(tasks, plan.num_adapters, folder)
    for task in tasks:
        task.folder.mkdir()
    written = made_in_turn([(task, index) for task in tasks for index in range(plan.num_adapters)])
    made = {}
    for task in tasks:
        paths, digests = [], []
        for path, digest in islice(written, plan.num_adapters):
            paths.append(path)
            digests.append(digest)
            on_file()
        check_distinct(paths, digests)
        made[task.form] = Made(paths, describe(task, digests))
    return made


def describe(task: Task, digests: list[str]) -> AdapterSet:
    """The files of one form."""
    return AdapterSet(
        format=task.form.adapters,
        count=len(digests),
        ranks=task.ranks,
        bytes=sum(file.stat().st_size for file in task.folder.rglob("*") if file.is_file()),
        weights_digest=hashlib.sha256("\n".join(digests).encode()).hexdigest(),
    )


def made_in_turn(jobs: list[tuple[Task, int]]) -> Iterator[tuple[Path, str]]:
    """Path and digest of each adapter, in order, made by this process or, if they are many, by several."""
    if len(jobs) < MANY:
        yield from itertools.starmap(make_one, jobs)
        return
    # A fork would take over torch's threads in an unknown state.
    with ProcessPoolExecutor(min(MAX_PROCESSES, cores()), mp_context=get_context("spawn")) as pool:
        yield from pool.map(make_one, *zip(*jobs, strict=True), chunksize=8)


def make_one(task: Task, index: int) -> tuple[Path, str]:
    """Write adapter `index`; its path, and the digest of its weights whatever their form."""
    rank = task.ranks[index % len(task.ranks)]
    seed = (task.seed << 20) + index
    adapter = random_adapter(task.base, task.modules, task.form.method, rank, seed, task.dtype)
    return write(adapter, task.form, task.folder / f"adapter-{index:05d}"), weights_digest(adapter)


def write(adapter: Adapter, form: Form, stem: Path) -> Path:
    """Write one adapter in its form; returns the path of the file or folder."""
    if form.adapters == "preft":
        from engine_patch.store.file import write_adapter

        path = stem.with_name(f"{stem.name}.preft")
        write_adapter(path, adapter)
        return path
    from preft_cli.adapters.peft_out import write_peft

    write_peft(stem, adapter)
    return stem


def require_space(tasks: list[Task], count: int, folder: Path) -> None:
    """Find out now, not after minutes of writing, that the disk is too small.

    Raises:
        UserError: says how much is missing, and how to use another disk.
    """
    needed = 0
    for task in tasks:
        shapes = task.modules.linear if "lora" in parts(task.form.method) else task.modules.streams
        ranks = sum(task.ranks[index % len(task.ranks)] for index in range(count))
        needed += ranks * sum(map(sum, shapes.values())) * ITEM_BYTES[task.dtype]
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"bench: {count} adapters for each arm take {needed / 1e9:.1f} GB, and {folder.parent} has {free / 1e9:.1f} GB"
            " free; set TMPDIR to a larger disk, or lower bench.num_adapters or bench.rank"
        )


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
