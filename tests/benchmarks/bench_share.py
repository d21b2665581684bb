"""How fast one worker of a tensor-parallel engine loads its share of adapters: python -m tests.benchmarks.bench_share

Files lie in the page cache, so that this is reading, verifying and cutting; with one loader, and with as many as the host
tier has.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from engine_patch.pool.host import LOADERS
from engine_patch.pool.layers import EngineLayers, Slice, part_shares
from engine_patch.pool.share import Sharer
from engine_patch.ref import AdapterRef
from engine_patch.store.file import read_header
from tests.benchmarks.common import about, say, seconds, spread, write
from tests.benchmarks.material import Shape, random_adapter, write_ref

ROW_PARALLEL = ("o_proj", "down_proj")


class Sliced:
    """What vLLM's layers do to A and B on the first of `tp_size` workers."""

    n_slices = 1

    def __init__(self, name: str, tp_size: int) -> None:
        self.tp_size = tp_size
        self._by_rows = name.endswith(ROW_PARALLEL)

    def slice_lora_a(self, a: torch.Tensor) -> torch.Tensor:
        return a[:, : a.shape[1] // self.tp_size] if self._by_rows else a

    def slice_lora_b(self, b: torch.Tensor) -> torch.Tensor:
        return b if self._by_rows else b[: b.shape[0] // self.tp_size]


def layers(shape: Shape, workers: int) -> EngineLayers:
    """Those of the first worker."""
    slices = []
    for name, sizes in shape.modules.items():
        [share] = part_shares(Sliced(name, workers), [sizes])
        slices.append(Slice(name, *sizes, *share))
    return EngineLayers([(None, slices)], shape.base)


def rates(sharer: Sharer, refs: list[AdapterRef], loaders: int, repeats: int) -> list[float]:
    """Adapters a second, for each repetition."""
    headers = [read_header(ref.path) for ref in refs]
    share = sharer.share(headers[0])
    into = [torch.zeros(share.num_bytes, dtype=torch.uint8) for _ in refs]
    with ThreadPoolExecutor(8) as readers, ThreadPoolExecutor(loaders) as pool:

        def load(index: int) -> None:
            sharer.load(refs[index].path, headers[index], into[index], readers.map)

        def all_of_them() -> None:
            list(pool.map(load, range(len(refs))))

        all_of_them()  # files into the page cache
        return [len(refs) / seconds(all_of_them) for _ in range(repeats)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-70b")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as vLLM's workers do
    shape = Shape.published(options.shape)
    made = layers(shape, options.workers)
    limits = shape.limits(options.rank, torch.bfloat16, 1 << 40, 1 << 40).model_copy(update={"modules": made.sizes()})
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-share-") as folder:
        refs = [
            write_ref(Path(folder) / f"{seed}.preft", random_adapter(shape.base, shape.modules, options.rank, seed))
            for seed in range(options.adapters)
        ]
        sharer = Sharer(made, limits, torch.bfloat16)
        for loaders in (1, LOADERS):
            found[f"{loaders} loaders"] = spread(rates(sharer, refs, loaders, options.repeats))
            say(f"{loaders} loaders: {found[f'{loaders} loaders']['median']:.2f} adapters a second")
        size = refs[0].path.stat().st_size
    settings = {name: str(value) for name, value in vars(options).items() if name != "out"}
    write(options.out, about("share", **settings) | {"bytes": size, "adapters_per_s": found})


if __name__ == "__main__":
    main()
