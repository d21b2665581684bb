"""First-token latency by where the adapter is: python -m tests.benchmarks.bench_first_token --model random:llama-3.1-8b

One request at a time, 256 prompt tokens, one token out, no prefix caching. In each repetition, all in turn, each on an
adapter of its own:

resident   the adapter is on the device
host       it is in host memory only
cold       it is in its file only, out of the page cache
read       no request: another cold file to host memory, as its own cost
copy       no request: as many bytes from host to device by one `copy_`
base       no adapter

The ratio `cold/(resident+read+copy)` says what waiting for a cold adapter costs beyond the work that it must cost.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from engine_patch.adapter import DTYPES
from engine_patch.pool.tiers import AdapterTiers
from engine_patch.ref import AdapterRef
from engine_patch.store.layout import PAGE_BYTES
from preft_cli.bench.device import find_device, resolve_dtype
from preft_cli.bench.plan import CPU_BLOCK_SIZE
from preft_cli.models import linear_modules, resolve
from tests.benchmarks import common, disk
from tests.benchmarks.common import in_turn, say, seconds, spread, synchronise
from tests.benchmarks.material import Shape, random_adapter, write_ref

PROMPT_TOKENS = 256
WARM_UP = 3
SLOTS = 4


class Latencies:
    """An engine in this process, its tiers, and adapters that are put where they are wanted."""

    def __init__(self, llm: Any, refs: list[AdapterRef], vocab: int) -> None:
        from engine_patch.requests import lora_request

        self.llm, self.refs, self._rng, self._vocab = llm, refs, random.Random(0), vocab
        # Made before files go cold: a server reads headers when it lists its folder.
        self.requests = {ref.digest: lora_request(ref.path.stem, ref.path) for ref in refs}
        self.tiers: AdapterTiers = llm.collective_rpc(lambda worker: worker.model_runner.lora_manager.preft)[0]
        for ref in refs:
            self.tiers.load(ref)
        self._scratch = torch.empty_like(self._host_bytes(refs[0]), device=common.device())
        self.cached: list[float] = []
        """Share of each file that was in the page cache before it was read cold."""

    def resident(self, ref: AdapterRef) -> float:
        self.answer(ref)
        self._expect(ref, host=True, device=True)
        return seconds(lambda: self.answer(ref))

    def host(self, ref: AdapterRef) -> float:
        self.tiers.load(ref)
        self._off_device(ref)
        self._expect(ref, host=True, device=False)
        return seconds(lambda: self.answer(ref))

    def cold(self, ref: AdapterRef) -> float:
        self._to_file(ref)
        taken = seconds(lambda: self.answer(ref))
        self._expect(ref, host=True, device=True)
        return taken

    def read(self, ref: AdapterRef) -> float:
        self._to_file(ref)
        host = self.tiers.host

        def work() -> None:
            host.start(ref)
            while not host.ready(ref.digest):
                host.wait([ref.digest], None)

        return seconds(work)

    def copy(self, ref: AdapterRef) -> float:
        self.tiers.load(ref)
        source = self._host_bytes(ref)

        def work() -> None:
            self._scratch.copy_(source, non_blocking=True)
            synchronise()

        return seconds(work)

    def answer(self, ref: AdapterRef | None) -> None:
        """One request from its arrival to its token."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=[self._rng.randrange(self._vocab) for _ in range(PROMPT_TOKENS)])
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        request = self.requests[ref.digest] if ref else None
        (output,) = self.llm.generate([prompt], params, use_tqdm=False, lora_request=request)
        if len(output.outputs[0].token_ids) != 1:
            raise RuntimeError(f"a request came back without its token: {output}")

    def _host_bytes(self, ref: AdapterRef) -> torch.Tensor:
        return self.tiers.host.adapters[ref.digest].bytes

    def _off_device(self, ref: AdapterRef) -> None:
        synchronise()
        self.tiers.want([], [])  # no request is left
        if ref.digest in self.tiers.device.adapters:
            self.tiers.device.drop(ref.digest)

    def _to_file(self, ref: AdapterRef) -> None:
        self._off_device(ref)
        self.tiers.forget(ref.digest)
        self._expect(ref, host=False, device=False)
        self.cached.append(disk.drop(ref.path))

    def _expect(self, ref: AdapterRef, host: bool, device: bool) -> None:
        found = (ref.digest in self.tiers.host.adapters, ref.digest in self.tiers.device.adapters)
        if found != (host, device):
            raise RuntimeError(f"the adapter is not where it should be measured: (host, device) is {found}")


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
    options.dtype = {"auto": "bfloat16"}.get(options.dtype, options.dtype)
    if find_device() == "cpu":
        options.dtype = {"auto": "bfloat16"}.get(str(resolve_dtype("auto", "cpu")), "float32")
    base = resolve(options.model)
    shape = Shape(options.model, base.hf_config, base.fingerprint, linear_modules(base))
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
        sides = {
            "resident": lambda ref=own[0]: latencies.resident(ref),
            "host": lambda ref=own[1]: latencies.host(ref),
            "cold": lambda ref=own[2]: latencies.cold(ref),
            "read": lambda ref=own[3]: latencies.read(ref),
            "copy": lambda ref=own[4]: latencies.copy(ref),
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
    ratios = {
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
