"""Did the schedules come to the places where mistakes are made? Counted from the engine, and asserted by the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engine_patch.pool.counters import PoolCounters
from engine_patch.runners import v1, v2

METRICS = {
    "preemptions": "vllm:num_preemptions",
    "cached_tokens": "vllm:prefix_cache_hits",
}


@dataclass
class Seen:
    """Over all engines of a run."""

    preemptions: int = 0
    cached_tokens: int = 0
    straddling_chunks: int = 0
    """Chunks with prompt and sampled tokens in them: of requests that came back after a preemption."""
    one_token_prompt_chunks: int = 0
    """One position of the prompt, in a step of its own."""
    mixed_steps: int = 0
    """Steps with adapted and with unadapted tokens."""
    most_adapters_in_a_step: int = 0
    evictions: int = 0
    """Adapters that had to leave the device, or host memory, for others."""
    compactions: int = 0
    """Times that adapters were moved on the device."""
    engines: list[dict[str, Any]] = field(default_factory=list)
    """What ran: runner, scheduling, graphs."""

    @contextmanager
    def watch(self, llm: Any) -> Iterator[None]:
        """Count what `llm` does while the body runs."""
        runner = v2 if llm.llm_engine.vllm_config.use_v2_model_runner else v1
        counted, mapped = runner.adapted_counts, runner.adapter_runs

        def count(prefill_only: Any, num_prompt: Any, num_computed: Any, num_scheduled: Any) -> Any:
            adapted = counted(prefill_only, num_prompt, num_computed, num_scheduled)
            end = num_computed + num_scheduled
            self.straddling_chunks += int((prefill_only & (num_computed < num_prompt) & (end > num_prompt)).sum())
            self.one_token_prompt_chunks += int((prefill_only & (num_scheduled == 1) & (end <= num_prompt)).sum())
            self.mixed_steps += bool(0 < adapted.sum() < num_scheduled.sum())
            return adapted

        def count_adapters(ids: Any, adapted: Any, num_scheduled: Any) -> Any:
            runs = mapped(ids, adapted, num_scheduled)
            self.most_adapters_in_a_step = max(self.most_adapters_in_a_step, len(set(runs.ids[runs.counts > 0]) - {0}))
            return runs

        runner.adapted_counts, runner.adapter_runs = count, count_adapters
        self.engines.append(describe(llm))
        try:
            yield
        finally:
            runner.adapted_counts, runner.adapter_runs = counted, mapped
            for pool in map(PoolCounters.model_validate, llm.collective_rpc("preft_count")):
                self.evictions += pool.device.evictions + pool.host.evictions
                self.compactions += pool.compactions
            metrics = {metric.name: metric for metric in llm.get_metrics()}
            for counter, name in METRICS.items():
                setattr(self, counter, getattr(self, counter) + metrics[name].value)


def describe(llm: Any) -> dict[str, Any]:
    """The settings of an engine that decide which code computes, and that the patch is live in all of its processes."""
    from engine_patch.status import ask_offline, require_live

    statuses = ask_offline(llm)
    require_live(statuses)
    config = llm.llm_engine.vllm_config
    return {
        "processes": [status.role for status in statuses],
        "dtype": str(config.model_config.dtype),
        "async_scheduling": config.scheduler_config.async_scheduling,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "slots": config.lora_config.max_loras,
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "kv_blocks": config.cache_config.num_gpu_blocks,
    }
