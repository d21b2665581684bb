"""How long `preft store ls` takes for 10,000 adapters: `python -m tests.benchmarks.bench_store_ls [--adapters N]`.

Prints JSON: seconds of the whole command, start of Python included, the median and all of five runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
DISTINCT = 20
RUNS = 5


def make_store(folder: Path, adapters: int) -> None:
    """`adapters` files: copies of a few distinct ones, so that making them takes seconds."""
    import torch

    from engine_patch.adapter import Adapter, LowRankPair
    from engine_patch.base_model import BaseFingerprint
    from engine_patch.store import write_adapter

    base = BaseFingerprint("llama", 64, 128, 30, 4, 2, 1000, "0123456789abcdef")
    for index in range(min(DISTINCT, adapters)):
        rank = 4 * (1 + index % 4)
        pairs = {
            f"model.layers.{layer}.self_attn.{name}": LowRankPair(torch.randn(rank, 64), torch.randn(64, rank), 2.0)
            for layer in range(30)
            for name in ("q_proj", "v_proj")
        }
        meta = {
            "base_model": "some/base-model",
            "step": index,
            "peft": {"r": rank, "target_modules": ["q_proj", "v_proj"]},
        }
        write_adapter(folder / f"user-{index:05}.preft", Adapter("lorap", base, pairs, meta))
    for index in range(DISTINCT, adapters):
        shutil.copyfile(folder / f"user-{index % DISTINCT:05}.preft", folder / f"user-{index:05}.preft")


def seconds(store: Path, *options: str) -> list[float]:
    """The wall time of each run, after one that warms the file cache."""
    command = [sys.executable, "-m", "preft_cli", "store", "ls", "--store", str(store), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, cwd=store)
        times.append(time.perf_counter() - start)
    return times[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=10_000)
    adapters = parser.parse_args().adapters
    with tempfile.TemporaryDirectory() as folder:
        make_store(Path(folder), adapters)
        runs = {"json": seconds(Path(folder), "--json"), "plain": seconds(Path(folder))}
    medians = {f"{form}_median_s": round(statistics.median(times), 3) for form, times in runs.items()}
    rounded = {form: [round(value, 3) for value in times] for form, times in runs.items()}
    print(json.dumps({"adapters": adapters, **medians, "runs_s": rounded}, indent=2))


if __name__ == "__main__":
    main()
