"""An engine in the worker's own process, through `vllm.LLM`: all requests at once, as fast as it can."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from engine_patch.errors import PreftError
from preft_cli.bench.engine import Answer, Answered, EngineSpec, plugin_options
from preft_cli.bench.results import Counters
from preft_cli.bench.workload import Request

TIERS = ("device", "host")
"""Of adapters, in `Counters.adapter_loads`."""

COUNTED = {
    "preemptions": "vllm:num_preemptions",
    "prompt_tokens": "vllm:prompt_tokens",
    "prefix_cache_queries": "vllm:prefix_cache_queries",
    "prefix_cache_hits": "vllm:prefix_cache_hits",
}
"""Fields of `Counters` and vLLM's names for them."""


class OfflineEngine:
    """`vllm.LLM` with the arm's arguments."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM

        extra = {"additional_config": {"preft": plugin_options(spec)}} if spec.plugin else {}
        self._llm = LLM(**spec.engine_args, **extra, disable_log_stats=False)
        self._plugin = spec.plugin
        self._adapters = [lora_request(index, path) for index, path in enumerate(spec.adapters)]
        self.settings = engine_settings(self._llm.llm_engine.vllm_config)
        self.patch = patch_status(self._llm) if spec.plugin else []

    def answer(self, requests: list[Request], *, warm_up: bool = False) -> Answered:
        """See `Engine.answer`."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=request.prompt_token_ids) for request in requests]
        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=request.output_len, detokenize=False)
            for request in requests
        ]
        adapters = [self._adapters[request.adapter] for request in requests] if self._adapters else None
        if not self._llm.reset_prefix_cache():
            raise PreftError("the engine did not empty its prefix cache: something still holds blocks of it")
        before = self._count()
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        seconds = time.perf_counter() - started
        answers = [Answer(len(output.outputs[0].token_ids), output.outputs[0].finish_reason) for output in outputs]
        return Answered(seconds, answers, difference(before, self._count()), None)

    def stop(self) -> None:
        """Nothing to do: the engine ends with the worker's interpreter."""

    def _count(self) -> Counters:
        metrics = self._llm.get_metrics()
        counted = {}
        for field, name in COUNTED.items():
            values = [metric.value for metric in metrics if metric.name == name]
            if not values:
                raise PreftError(f"the engine does not count {name}: a zero in its place would be made up")
            counted[field] = int(sum(values))
        return Counters(**counted, adapter_loads=self._loads() if self._plugin else None)

    def _loads(self) -> dict[str, int]:
        workers = self._llm.collective_rpc("preft_count")
        return {tier: sum(worker[tier]["misses"] for worker in workers) for tier in TIERS}


def difference(before: Counters, after: Counters) -> Counters:
    """What was counted between two readings."""
    loads = None
    if after.adapter_loads is not None:
        loads = {tier: count - (before.adapter_loads or {}).get(tier, 0) for tier, count in after.adapter_loads.items()}
    counted = {field: getattr(after, field) - getattr(before, field) for field in COUNTED}
    return Counters(**counted, adapter_loads=loads)


def lora_request(index: int, path: Path) -> Any:
    """vLLM's name for an adapter: the stock engine takes PEFT folders, the plugin `.preft` files."""
    if path.suffix == ".preft":
        from engine_patch import requests

        return requests.lora_request(path.stem, path)
    from vllm.lora.request import LoRARequest

    return LoRARequest(path.name, index + 1, str(path))


def patch_status(llm: Any) -> list[dict[str, Any]]:
    """Status of the plugin in the engine core and in every worker.

    Raises:
        PreftError: if one of them runs without it: its numbers would be the stock engine's.
    """
    from engine_patch.status import ask_offline, require_live

    statuses = ask_offline(llm)
    require_live(statuses)
    return [status.model_dump() for status in statuses]


def engine_settings(config: Any) -> dict[str, Any]:
    """The settings that decide speed, as vLLM's `VllmConfig` resolved them from arguments and defaults."""
    model, cache, scheduler, compilation = (
        config.model_config,
        config.cache_config,
        config.scheduler_config,
        config.compilation_config,
    )
    lora = config.lora_config
    return {
        "device": config.device_config.device_type,
        "dtype": str(model.dtype),
        "seed": model.seed,
        "enforce_eager": model.enforce_eager,
        "compilation_mode": str(compilation.mode),
        "cudagraph_mode": str(compilation.cudagraph_mode),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "async_scheduling": scheduler.async_scheduling,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "block_size": cache.block_size,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "lora": None
        if lora is None
        else {
            "max_loras": lora.max_loras,
            "max_cpu_loras": lora.max_cpu_loras,
            "max_lora_rank": lora.max_lora_rank,
            "dtype": str(lora.lora_dtype),
            "cudagraph_specialize_lora": compilation.cudagraph_specialize_lora,
        },
    }
