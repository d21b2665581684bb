"""The decode rate with adapters beside that of the base engine: python -m tests.benchmarks.bench_decode --arms base direftp

One engine for each arm, each in a process of its own, all alive at once and only one at work. All arms have the same requests,
each with an adapter of its own, and only steps in which all of them decode are timed. In each repetition, all arms in turn make
some of those steps, so that both sides of a ratio are seconds apart on a machine that is never quite quiet. `X/base` is the ratio
of the rates of one repetition; medians of all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_patch.requests import lora_request
from preft_cli.bench.arms import ARMS, BASE, environment
from preft_cli.bench.device import find_device, resolve_dtype
from preft_cli.bench.plan import CPU_BLOCK_SIZE
from preft_cli.bench.weights import random_adapter
from preft_cli.models import resolve
from preft_cli.models.modules import modules_of
from preft_cli.threads import wait_politely
from tests.benchmarks import common
from tests.benchmarks.common import in_turn, say, spread
from tests.benchmarks.material import write_ref

WARM_UP = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--model", default="smollm2-135m", help="as model.base takes it")
    parser.add_argument("--arms", nargs="+", default=[BASE, "direftp"], choices=[BASE, "lorap", "direftp"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32, help="as many adapters")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--steps", type=int, default=8, help="steps of one repetition")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wait_politely()
    options.dtype = resolve_dtype(options.dtype, find_device())
    if options.serve:
        serve(options)
        return
    if BASE not in options.arms:
        parser.error("--arms: base is what the others are compared with")
    engines = {arm: Engine(arm) for arm in options.arms}
    try:
        for engine in engines.values():
            engine.answer()  # it is up
        rates: dict[str, list[float]] = {arm: [] for arm in engines}
        for repetition in range(options.repeats + WARM_UP):
            for arm, rate in in_turn({name: one.measure for name, one in engines.items()}, repetition).items():
                rates[arm].append(rate)
            say(f"{repetition}: " + ", ".join(f"{arm} {of[-1]:.1f} tokens/s" for arm, of in rates.items()))
    finally:
        for engine in engines.values():
            engine.stop()
    common.write(options.out, result(options, {arm: of[WARM_UP:] for arm, of in rates.items()}))


def result(options: argparse.Namespace, rates: dict[str, list[float]]) -> dict[str, Any]:
    """The JSON."""
    return {
        **common.about("decode rate", **{name: str(value) for name, value in vars(options).items() if name != "serve"}),
        "ratios": {
            f"{arm}/{BASE}": spread(common.quotients(of, rates[BASE])) for arm, of in rates.items() if arm != BASE
        },
        "ratios_said": "median, lowest and highest of the repetitions' ratios",
        "tokens_per_second": {arm: spread(of) | {"all": of} for arm, of in rates.items()},
    }


class Engine:
    """The process of one arm: a line to its standard input is answered by the rate of one repetition."""

    def __init__(self, arm: str) -> None:
        changes = environment(
            ARMS[arm], find_device(), "online"
        )  # the engine in a process of its own, as a server has it
        kept = {name: value for name, value in os.environ.items() if changes.get(name, "") is not None}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.bench_decode", *sys.argv[1:], "--serve", arm],
            env={**kept, **{name: value for name, value in changes.items() if value is not None}},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> float:
        """Wait for the next one."""
        assert self._process.stdout
        for line in self._process.stdout:  # vLLM logs to standard output too
            if line.startswith("{"):
                return float(json.loads(line)["rate"])
        raise SystemExit(f"the engine of an arm ended with exit code {self._process.wait()}")

    def measure(self) -> float:
        """One repetition: tokens a second, of all requests together."""
        assert self._process.stdin
        self._process.stdin.write("measure\n")
        self._process.stdin.flush()
        return self.answer()

    def stop(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def serve(options: argparse.Namespace) -> None:
    """Be the process of `Engine`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is stepped from here
    from vllm import LLM

    base, method = resolve(options.model), ARMS[options.serve].method
    with tempfile.TemporaryDirectory(prefix="bench-decode-") as folder:
        adapters: list[Any] = [None] * options.requests
        if method:
            for index in range(options.requests):
                path = Path(folder) / f"a{index}.preft"
                dtype = options.dtype if options.dtype != "auto" else "bfloat16"
                write_ref(path, random_adapter(base.fingerprint, modules_of(base), method, options.rank, index, dtype))
                adapters[index] = lora_request(f"a{index}", path)
        llm = LLM(**engine_args(options, base, bool(method)))
        print(json.dumps({"rate": 0}), flush=True)
        rates = decode(llm, options, base.hf_config.vocab_size, adapters)
        for _ in sys.stdin:
            print(json.dumps({"rate": next(rates)}), flush=True)


def engine_args(options: argparse.Namespace, base: Any, with_adapters: bool) -> dict[str, Any]:
    """As `preft bench` has them."""
    args: dict[str, Any] = {
        "model": str(base.path),
        "dtype": options.dtype,
        "max_model_len": options.prompt + options.output,
        "max_num_seqs": options.requests,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    if base.random:
        args["load_format"] = "dummy"
    if with_adapters:
        args |= {"enable_lora": True, "max_loras": options.slots, "max_lora_rank": options.rank}
    if find_device() == "cpu":
        # Eager for the base too: with LoRA on, vLLM's CPU engine compiles nothing.
        args |= {"enforce_eager": True, "block_size": CPU_BLOCK_SIZE, "kv_cache_memory_bytes": 1 << 29}
    else:
        args["kv_cache_memory_bytes"] = 8 << 30  # the engines share one GPU
    return args


def decode(llm: Any, options: argparse.Namespace, vocab: int, adapters: list[Any]) -> Iterator[float]:
    """Answer all requests, again and again; tokens a second of each `options.steps` steps in which all of them decode."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    for turn in itertools.count():
        rng = random.Random(f"{options.seed} {turn}")
        for index, adapter in enumerate(adapters):
            prompt = {"prompt_token_ids": [rng.randrange(vocab) for _ in range(options.prompt)]}
            engine.add_request(f"{turn}-{index}", prompt, sampling, lora_request=adapter)
        counts: dict[str, int] = {}

        def step(counts: dict[str, int] = counts) -> None:
            counts.update((out.request_id, len(out.outputs[0].token_ids)) for out in engine.step())

        while len(counts) < len(adapters):
            step()
        while max(counts.values()) + options.steps < options.output:
            began, before = time.perf_counter(), sum(counts.values())
            for _ in range(options.steps):
                step()
            yield (sum(counts.values()) - before) / (time.perf_counter() - began)
        while engine.has_unfinished_requests():
            step()


if __name__ == "__main__":
    main()
