"""Whether copies of adapters lie beside the steps or between them: python -m tests.benchmarks.profile_copies --rank 64

With `--model random:llama-3.1-8b` on a GPU. One engine, and more requests at once than a step holds, each with the next of the
adapters, which lie in host memory. They are answered without adapters and with, in turn, to see what adapters cost; then once
more under torch.profiler.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine_patch.requests import lora_request
from preft_cli.bench.device import find_device, resolve_dtype
from preft_cli.bench.plan import CPU_BLOCK_SIZE
from preft_cli.bench.weights import random_adapter
from preft_cli.models import BaseModel, resolve
from preft_cli.models.modules import modules_of
from tests.benchmarks import common
from tests.benchmarks.common import say, seconds
from tests.benchmarks.material import write_ref
from tests.benchmarks.profile_profilers import window

LARGE = 1 << 20
"""Bytes: copies of less are those of a step's inputs."""

SHORT_US = 20
"""Between two kernels: what is shorter is no gap."""

LONG_US = 3000
"""Gaps that are listed."""


class Span(NamedTuple):
    """Of the device's time, in microseconds."""

    start: float
    end: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--model", default="smollm2-135m", help="as model.base takes it")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=128)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--output", type=int, default=16, help="tokens; 2 in the traced pass")
    parser.add_argument("--kv-cache", type=int, default=36 << 30, help="bytes")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    options.dtype = resolve_dtype(options.dtype, find_device())
    with tempfile.TemporaryDirectory(prefix="profile-copies-") as folder:
        burst = Burst(options, resolve(options.model), Path(folder))
        passes: dict[str, list[float]] = {"plain": [], "adapted": []}
        for _ in range(3):
            for name, of in passes.items():
                of.append(burst.answer(name == "adapted", options.output))
                say(f"{name} {of[-1]:.2f} s")
        result = {
            **common.about("copies", **{name: str(value) for name, value in vars(options).items()}),
            "seconds": {name: of[1:] for name, of in passes.items()},
            "ratios": {"adapted/plain": common.spread(common.quotients(passes["adapted"][1:], passes["plain"][1:]))},
            "trace": burst.traced(Path(folder)) if torch.cuda.is_available() else None,
        }
    common.write(options.out, result)
    say(json.dumps(result["trace"], indent=1))


class Burst:
    """An engine, and requests that come at once."""

    def __init__(self, options: argparse.Namespace, base: BaseModel, folder: Path) -> None:
        from vllm import LLM
        from vllm.inputs import TokensPrompt

        modules, rng = modules_of(base), random.Random(0)
        refs = [
            write_ref(
                (folder / f"a{seed}.preft").resolve(),
                random_adapter(base.fingerprint, modules, "lorap", options.rank, seed, options.dtype),
            )
            for seed in range(options.adapters)
        ]
        held = sum(ref.path.stat().st_size for ref in refs) + (1 << 28)
        args: dict[str, Any] = {
            "model": str(base.path),
            "dtype": options.dtype,
            "max_model_len": 2 * options.prompt,
            "max_num_seqs": options.requests,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "enable_lora": True,
            "max_loras": options.slots,
            "max_lora_rank": max(8, options.rank),
            "kv_cache_memory_bytes": options.kv_cache,
            "additional_config": {"preft": {"host_pool_bytes": held}},
        }
        if base.random:
            args["load_format"] = "dummy"
        if find_device() == "cpu":
            args |= {"enforce_eager": True, "block_size": CPU_BLOCK_SIZE}
        else:
            args["gpu_memory_utilization"] = 0.01  # how much the KV cache takes is said already
        self._llm = LLM(**args)
        tiers = self._llm.collective_rpc(lambda worker: worker.model_runner.lora_manager.preft)[0]
        for ref in refs:
            tiers.load(ref)
        adapters = [lora_request(ref.path.stem, ref.path) for ref in refs]
        self._adapters = [adapters[index % len(adapters)] for index in range(options.requests)]
        vocab = base.hf_config.get_text_config().vocab_size
        self._prompts = [
            TokensPrompt(prompt_token_ids=[rng.randrange(vocab) for _ in range(options.prompt)])
            for _ in range(options.requests)
        ]

    def answer(self, adapted: bool, tokens: int) -> float:
        """Seconds to answer all requests."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        adapters = self._adapters if adapted else None
        return seconds(lambda: self._llm.generate(self._prompts, params, use_tqdm=False, lora_request=adapters))

    def traced(self, folder: Path) -> dict[str, Any]:
        """What the device did, once, with adapters."""
        from torch.profiler import ProfilerActivity, profile

        self.answer(True, 2)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.answer(True, 2)
        found.export_chrome_trace(str(folder / "trace.json"))
        top = window(found.profiler.kineto_results.events(), steps=1).top
        return summary(json.loads((folder / "trace.json").read_text())["traceEvents"]) | {
            "kernels_and_copies": [line.model_dump() for line in top]
        }


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """How copies and kernels lie to each other.

    Args:
        events: of a Chrome trace, times in microseconds.
    """
    device = [event for event in events if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy")]
    large = [one for one in device if one["cat"] == "gpu_memcpy" and one["args"].get("bytes", 0) >= LARGE]
    copies = [Span(one["ts"], one["ts"] + one["dur"]) for one in large]
    busy = merged([Span(one["ts"], one["ts"] + one["dur"]) for one in device if one["cat"] == "kernel"])
    gaps = [Span(one.end, other.start) for one, other in itertools.pairwise(busy)]
    copying_s = sum(copy.end - copy.start for copy in copies) / 1e6
    return {
        "seconds": (busy[-1].end - min(span.start for span in (*busy, *copies))) / 1e6,
        "kernels_s": sum(span.end - span.start for span in busy) / 1e6,
        "copies": len(copies),
        "copied_gb": sum(one["args"]["bytes"] for one in large) / 1e9,
        "copying_s": copying_s,
        "copying_beside_kernels_s": sum(common_part(span, copy) for span in busy for copy in copies) / 1e6,
        "long_gaps_ms": [
            {
                "gap": (gap.end - gap.start) / 1e3,
                "copying": sum(common_part(gap, copy) for copy in copies) / 1e3,
            }
            for gap in gaps
            if gap.end - gap.start >= LONG_US
        ],
    }


def merged(spans: list[Span]) -> list[Span]:
    """The same time in as few spans as possible, in order; gaps of less than `SHORT_US` are none."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end + SHORT_US:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def common_part(one: Span, other: Span) -> float:
    """Microseconds."""
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))


if __name__ == "__main__":
    main()
