"""Is the patch live? Asked of the engine core and of every worker before the server says that it is ready."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel

from engine_patch import patching
from engine_patch.errors import PreftError

EVERYWHERE = (
    "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager.create_lora_manager",
    "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager.set_active_adapters",
    "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA.create_lora_weights",
    "vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys",
    "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys",
    "vllm.v1.core.sched.scheduler.Scheduler.schedule",
    "vllm.v1.core.sched.scheduler.Scheduler._preempt_request",
    "vllm.v1.core.sched.scheduler.Scheduler._handle_blocked_waiting_request",
    "vllm.v1.engine.core.EngineCore._initialize_effective_attention_block_size",
)
RUNNERS = {
    "vllm.v1.worker.cpu_model_runner": (
        "vllm.platforms.cpu.CpuPlatform.get_punica_wrapper",
        "vllm.v1.worker.gpu_input_batch.InputBatch.make_lora_inputs",
    ),
    "vllm.v1.worker.gpu.model_runner": (
        "vllm.platforms.cuda.CudaPlatformBase.get_punica_wrapper",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.__init__",
        "vllm.v1.worker.gpu.lora_utils.LoraState.add_request",
        "vllm.v1.worker.gpu.lora_utils.LoraState.make_lora_inputs",
        "vllm.v1.worker.gpu.lora_utils.LoraState.get_activate_loras",
        "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager._init_candidates",
    ),
}
"""The modules of the runners that can hold the rule, and what must be replaced for each."""


class ProcessStatus(BaseModel):
    """What one process of the engine says of itself."""

    live: bool
    role: str
    """`engine core`, or the class of the worker's model runner."""
    pid: int
    missing: list[str]
    """Replacements that should be in place and are not."""
    patched: list[str]
    """All replacements, in order."""


def process_status(role: str, required: tuple[str, ...], known: bool = True) -> dict[str, Any]:
    """A `ProcessStatus` of this process as plain data, which is what vLLM's RPC carries."""
    missing = [name for name in required if name not in patching.ledger]
    live = known and not missing
    status = ProcessStatus(live=live, role=role, pid=os.getpid(), missing=missing, patched=list(patching.ledger))
    return status.model_dump()


def worker_status(worker: Any) -> dict[str, Any]:
    """What a worker says: its runner must be one that can hold the rule, with all that belongs to it in place."""
    runner = type(getattr(worker, "model_runner", None))
    extra = RUNNERS.get(runner.__module__)
    return process_status(
        f"{runner.__module__}.{runner.__qualname__}", (*EVERYWHERE, *(extra or ())), known=extra is not None
    )


def core_status(core: Any) -> dict[str, Any]:
    """What the engine core says, where scheduler and prefix cache live."""
    status = process_status("engine core", EVERYWHERE)
    if core.vllm_config.lora_config and getattr(core.scheduler, "preft_gate", None) is None:
        status |= {"live": False, "missing": [*status["missing"], "the scheduler's AdapterGate"]}
    return status


def patch() -> None:
    """Give every worker and the engine core the method `preft_status`, for RPC."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    patching.put(WorkerBase, "preft_status", worker_status)
    patching.put(EngineCore, "preft_status", core_status)


async def ask(engine_client: Any) -> list[ProcessStatus]:
    """The status of the engine core and of every worker behind vLLM's `AsyncLLM`.

    Raises:
        PreftError: the engine core does not know the question: the plugin is not in it.
    """
    try:
        core = await engine_client.engine_core.call_utility_async("preft_status")
        workers = await engine_client.collective_rpc("preft_status")
    except Exception as error:
        raise PreftError(f"the engine does not answer whether the prefill-only rule is live: {error}") from error
    return [ProcessStatus.model_validate(answer) for answer in (core, *workers)]


def ask_offline(llm: Any) -> list[ProcessStatus]:
    """The same for a `vllm.LLM`, whose engine core runs in a process of its own or in this one.

    Raises:
        PreftError: as `ask` does.
    """
    client = llm.llm_engine.engine_core
    try:
        core = (
            client.engine_core.preft_status() if hasattr(client, "engine_core") else client.call_utility("preft_status")
        )
        workers = llm.collective_rpc("preft_status")
    except Exception as error:
        raise PreftError(f"the engine does not answer whether the prefill-only rule is live: {error}") from error
    return [ProcessStatus.model_validate(answer) for answer in (core, *workers)]


def require_live(statuses: list[ProcessStatus]) -> None:
    """Refuse an engine in which one process lacks the patch.

    Raises:
        PreftError: names the process and what is missing.
    """
    if not statuses:
        raise PreftError("no worker answered whether the prefill-only rule is live; the engine is not used")
    for status in statuses:
        if not status.live:
            raise PreftError(
                f"process {status.pid} ({status.role}) runs without the prefill-only rule"
                f" (missing: {', '.join(status.missing) or 'support for this model runner'});"
                " it would apply adapters to every token"
            )
