"""The load: vLLM's own benchmark of a server, given our requests."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from preft_cli.bench.engine import Answer
from preft_cli.bench.results import Latency, Percentiles
from preft_cli.bench.workload import Request
from preft_cli.config.schema import LoadConfig

BASE_NAME = "base"
"""The base model's name on the server."""

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)


class Outcome(NamedTuple):
    """What the load generator saw."""

    seconds: float
    answers: list[Answer]
    latency: Latency | None
    """None when every request failed."""


def run_load(
    url: str, requests: Sequence[Request], models: Sequence[str], load: LoadConfig, *, closed_loop: int, seed: int
) -> Outcome:
    """Send all requests to the server at `url` as `load` says, and wait for the answers.

    Args:
        models: the model name of each request.
        closed_loop: requests in flight in a closed loop, where `load` sets no number.
        seed: of the arrival times.
    """
    import numpy as np
    from vllm.benchmarks.serve import TaskType, benchmark
    from vllm.utils.gc_utils import freeze_gc_heap

    # vLLM draws arrivals from numpy's global state: the same for the same requests, in every arm, others in each repetition.
    np.random.seed(zlib.crc32(f"{seed} {requests[0].id}".encode()))
    freeze_gc_heap()  # as `vllm bench serve` does: no pauses of ours in the latencies
    result = asyncio.run(
        benchmark(
            task_type=TaskType.GENERATION,
            endpoint_type="openai",
            api_url=f"{url}/v1/completions",
            base_url=url,
            model_id=BASE_NAME,
            model_name=BASE_NAME,
            tokenizer=NoTokenizer(),
            input_requests=to_samples(requests, models),
            request_rate=load.request_rate or math.inf,
            burstiness=1.0,  # Poisson
            max_concurrency=load.max_concurrency or (None if load.request_rate else closed_loop),
            goodput_config_dict=dict(load.goodput),
            selected_percentile_metrics=list(METRICS),
            selected_percentiles=list(PERCENTILES),
            ignore_eos=True,
            extra_body={"temperature": 0.0},
            # The test request that vLLM sends first is the first prompt: it would be in the caches when it counts.
            ready_check_timeout_sec=0,
            num_warmups=0,
            disable_tqdm=True,
            profile=False,
            logprobs=None,
            lora_modules=None,
            extra_headers=None,
        )
    )
    seen = zip(requests, result["output_lens"], result["errors"], strict=True)
    return Outcome(result["duration"], [to_answer(*one) for one in seen], to_latency(result))


class NoTokenizer:
    """What vLLM's benchmark gets for a tokenizer: token counts come from the server, and a model may have no tokenizer.

    Without one vLLM leaves out all latencies but the last. It is asked for the length of an answer whose stream ended without
    the server's count: such an answer is broken and counts as no tokens.
    """

    def __call__(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        """No tokens."""
        return SimpleNamespace(input_ids=[])


def to_samples(requests: Sequence[Request], models: Sequence[str]) -> list[Any]:
    """The requests in the form of vLLM's benchmark; each names its model and the exact length of its answer."""
    from vllm.benchmarks.datasets import SampleRequest

    return [
        SampleRequest(
            prompt=request.prompt_token_ids,
            prompt_len=len(request.prompt_token_ids),
            expected_output_len=request.output_len,
            request_overrides={"model": model, "min_tokens": request.output_len},
        )
        for request, model in zip(requests, models, strict=True)
    ]


def to_answer(request: Request, num_tokens: int, error: str) -> Answer:
    """One answer; vLLM's benchmark tells no finish reason, but an answer of the asked length has reached its limit."""
    if error:
        lines = error.strip().splitlines() or [error]
        return Answer(num_tokens, lines[-1 if lines[0].startswith("Traceback") else 0])
    return Answer(num_tokens, "length" if num_tokens == request.output_len else None)


def to_latency(result: dict[str, Any]) -> Latency | None:
    """The latencies over all requests that were answered."""
    if not result["completed"]:
        return None

    def percentiles(name: str) -> Percentiles:
        of = {f"p{percentile}": float(result[f"p{percentile}_{name}_ms"]) for percentile in PERCENTILES}
        return Percentiles(mean=float(result[f"mean_{name}_ms"]), **of)

    return Latency(**{f"{name}_ms": percentiles(name) for name in METRICS}, goodput=result["request_goodput"])
