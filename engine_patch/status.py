"""Is the patch live? Asked of every worker before the server says that it is ready."""

from __future__ import annotations

import os
from typing import Any

from engine_patch import patching
from engine_patch.errors import PreftError

REQUIRED = (
    "vllm.platforms.cpu.CpuPlatform.get_punica_wrapper",
    "vllm.v1.worker.gpu_input_batch.InputBatch.make_lora_inputs",
    "vllm.lora.worker_manager.WorkerLoRAManager._load_adapter",
)


def worker_status(worker: Any) -> dict[str, Any]:
    """What one worker says of itself: `live`, the runner's class, and what was replaced."""
    runner = getattr(worker, "model_runner", None)
    missing = [name for name in REQUIRED if name not in patching.ledger]
    # The only runner that has the rule in it.
    known = type(runner).__module__ == "vllm.v1.worker.cpu_model_runner"
    return {
        "live": known and not missing,
        "pid": os.getpid(),
        "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        "patched": list(patching.ledger),
        "missing": missing,
    }


def patch() -> None:
    """Give every worker the method `preft_status`, for `collective_rpc`."""
    from vllm.v1.worker.worker_base import WorkerBase

    patching.replace(WorkerBase, "preft_status", lambda upstream: worker_status)


def require_live(statuses: list[dict[str, Any]]) -> None:
    """Refuse an engine in which one worker lacks the patch.

    Raises:
        PreftError: names the worker and what is missing.
    """
    if not statuses:
        raise PreftError("no worker answered whether the prefill-only rule is live; the engine is not used")
    for index, status in enumerate(statuses):
        if not status["live"]:
            raise PreftError(
                f"worker {index} runs {status['runner']} without the prefill-only rule"
                f" (missing: {status['missing'] or 'support for this runner'}); it would apply adapters to every token."
                " This version of preft serves with vLLM's CPU build (pip install 'preft[cpu]')"
            )
