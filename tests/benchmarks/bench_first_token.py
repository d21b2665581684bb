"""First-token latency by where the adapter is: python -m tests.benchmarks.bench_first_token --model random:llama-3.1-8b

One request at a time, 256 prompt tokens, one token out, no prefix caching. In each repetition, all in turn, each on an
adapter of its own:

resident   the adapter is on the device
host       it is in host memory only
cold       it is in its file only, out of the page cache
read       no request: another cold file to host memory, as its own cost
copy       no request: as many bytes from host to device by one `copy_`
base       no adapter

The ratio `(cold-read-copy)/resident` says what waiting for a cold adapter costs beyond the work that it must cost; at most 1.3.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine_patch.adapter import DTYPES
from engine_patch.ref import AdapterRef
from engine_patch.store.layout import PAGE_BYTES
from preft_cli.bench.device import find_device, resolve_dtype
from preft_cli.bench.plan import CPU_BLOCK_SIZE
from preft_cli.models import modules_of, resolve
from tests.benchmarks import common, disk
from tests.benchmarks.common import in_turn, say, seconds, spread
from tests.benchmarks.latencies import PROMPT_TOKENS, Latencies
from tests.benchmarks.material import Shape, random_adapter, write_ref

WARM_UP = 3
SLOTS = 4


def engine_args(options: argparse.Namespace, path: Path, is_random: bool, pool_bytes: int) -> dict[str, Any]:
    """Both pools hold every adapter: states are set by hand."""
    args: dict[str, Any] = {
        "model": str(path),
        "dtype": options.dtype,
        "max_model_len": 2 * PROMPT_TOKENS,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "enable_lora": True,
        "max_loras": SLOTS,
        "max_cpu_loras": max(SLOTS, options.adapters),
        "max_lora_rank": options.rank,
        "gpu_memory_utilization": 0.6,
        "additional_config": {"preft": {"gpu_pool_bytes": pool_bytes, "host_pool_bytes": pool_bytes}},
    }
    if is_random:
        args["load_format"] = "dummy"
    if find_device() == "cpu":
        args |= {"enforce_eager": True, "block_size": CPU_BLOCK_SIZE, "kv_cache_memory_bytes": 1 << 28}
        del args["gpu_memory_utilization"]
    return args


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--model", default="random:qwen2.5-0.5b", help="as model.base takes it")
    parser.add_argument("--rank", type=int, default=8, help="one of vLLM's: 8, 16, 32, 64 ...")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--adapters", type=int, default=16, help="distinct adapters, at least 6")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path(), help="where files are made: on the disk to be measured")
    options = parser.parse_args()
    if options.adapters < 6:
        parser.error("--adapters: at least 6, so that each state has one of its own")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the tiers are set and looked into from here
    if options.dtype == "auto":  # float32 on a CPU that only emulates bfloat16
        options.dtype = "float32" if resolve_dtype("auto", find_device()) == "float32" else "bfloat16"
    base = resolve(options.model)
    shape = Shape(options.model, base.hf_config, base.fingerprint, modules_of(base).linear)
    dtype = DTYPES[options.dtype]
    num_bytes = shape.limits(options.rank, dtype, 1 << 62, 1 << 62).largest_pages() * PAGE_BYTES
    with tempfile.TemporaryDirectory(prefix="bench-first-token-", dir=options.folder) as folder:
        refs = [
            write_ref(
                (Path(folder) / f"a{seed}.preft").resolve(),
                random_adapter(shape.base, shape.modules, options.rank, seed, options.dtype),
            )
            for seed in range(options.adapters)
        ]
        times, cached = measure(
            options, engine_args(options, base.path, base.random, options.adapters * num_bytes), refs, base
        )
    common.write(options.out, result(options, times, cached, num_bytes))


def measure(
    options: argparse.Namespace, args: dict[str, Any], refs: list[AdapterRef], base: Any
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each state, repetition by repetition."""
    from vllm import LLM

    latencies = Latencies(LLM(**args), refs, base.hf_config.vocab_size)
    times: dict[str, list[float]] = defaultdict(list)
    for repetition in range(options.repeats + WARM_UP):
        own = [refs[(6 * repetition + index) % len(refs)] for index in range(5)]
        sides: dict[str, Callable[[], float]] = {
            "resident": partial(latencies.resident, own[0]),
            "host": partial(latencies.host, own[1]),
            "cold": partial(latencies.cold, own[2]),
            "read": partial(latencies.read, own[3]),
            "copy": partial(latencies.copy, own[4]),
            "base": lambda: seconds(lambda: latencies.answer(None)),
        }
        for name, taken in in_turn(sides, repetition).items():
            times[name].append(taken)
    say(", ".join(f"{name} {1000 * spread(of)['median']:.1f} ms" for name, of in times.items()))
    return {name: of[WARM_UP:] for name, of in times.items()}, latencies.cached[2 * WARM_UP :]


def result(
    options: argparse.Namespace, times: dict[str, list[float]], cached: list[float], num_bytes: int
) -> dict[str, Any]:
    """The JSON."""
    must = [sum(parts) for parts in zip(times["resident"], times["read"], times["copy"], strict=True)]
    with_copy = [sum(parts) for parts in zip(times["resident"], times["copy"], strict=True)]
    beyond = [cold - read - copy for cold, read, copy in zip(times["cold"], times["read"], times["copy"], strict=True)]
    ratios = {
        "(cold-read-copy)/resident": spread(common.quotients(beyond, times["resident"])),
        "cold/(resident+read+copy)": spread(common.quotients(times["cold"], must)),
        "host/(resident+copy)": spread(common.quotients(times["host"], with_copy)),
        "cold/resident": spread(common.quotients(times["cold"], times["resident"])),
    }
    return {
        **common.about("first token", **{name: str(value) for name, value in vars(options).items()}),
        "ratios": ratios,
        "ratios_said": "median, lowest and highest of the repetitions' ratios",
        "adapter_bytes": num_bytes,
        "seconds": times,
        "median_seconds": {name: spread(of)["median"] for name, of in times.items()},
        "cold_files_were_cold": all(share <= disk.COLD_SHARE for share in cached),
    }


if __name__ == "__main__":
    main()
