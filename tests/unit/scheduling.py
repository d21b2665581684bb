"""vLLM's own scheduler and prefix cache with nothing behind them: tests say which token each request is given."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from engine_patch.ref import AdapterRef

BLOCK = 16


def adapter(digest: str, method: str = "lorap", name: str | None = None, id_: int | None = None) -> Any:
    """A `LoRARequest` for a file that need not exist."""
    from vllm.lora.request import LoRARequest

    from engine_patch.requests import adapter_id

    path = AdapterRef(Path(f"/store/{digest}.preft"), method, digest).encode()
    return LoRARequest(name or digest, id_ or adapter_id(digest), path)


class Scheduling:
    """A `Scheduler` that is stepped by hand."""

    def __init__(
        self,
        model: Path,
        *,
        slots: int = 2,
        blocks: int = 1000,
        budget: int = 64,
        policy: str = "fcfs",
        kv_events: bool = False,
    ) -> None:
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.config.kv_events import KVEventsConfig
        from vllm.config.lora import LoRAConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        model_config = ModelConfig(str(model), dtype="float32", max_model_len=256, skip_tokenizer_init=True)
        cache_config = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        cache_config.num_gpu_blocks = blocks
        config = VllmConfig(
            model_config=model_config,
            cache_config=cache_config,
            scheduler_config=SchedulerConfig(
                max_num_seqs=min(64, budget),
                max_num_batched_tokens=budget,
                max_model_len=256,
                is_encoder_decoder=False,
                policy=policy,
            ),
            lora_config=LoRAConfig(max_loras=slots, max_cpu_loras=slots),
            device_config=DeviceConfig("cpu"),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=kv_events, publisher="null"),
        )
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        kv_cache = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(config, kv_cache, StructuredOutputManager(config), block_size=BLOCK)
        self._count = itertools.count()
        self.events: list[Any] = []
        """What vLLM would publish of its KV cache."""
        self.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)

    def add(self, prompt: list[int], lora_request: Any = None, max_tokens: int = 8, priority: int = 0) -> Any:
        """A waiting request."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            f"r{next(self._count)}",
            prompt,
            sampling,
            None,
            lora_request=lora_request,
            block_hasher=self._hasher,
            priority=priority,
        )
        self.scheduler.add_request(request)
        return request

    def step(self, token: int = 7) -> dict[str, int]:
        """One engine step in which every request that may is given `token`; the scheduled tokens by request id."""
        from vllm.v1.outputs import ModelRunnerOutput

        out = self.scheduler.schedule()
        ids = list(out.num_scheduled_tokens)
        requests = [self.scheduler.requests[id_] for id_ in ids]
        sampled = [[token] if request.num_computed_tokens >= request.num_tokens else [] for request in requests]
        self.scheduler.update_from_output(
            out, ModelRunnerOutput(ids, {id_: i for i, id_ in enumerate(ids)}, sampled_token_ids=sampled)
        )
        return dict(out.num_scheduled_tokens)
