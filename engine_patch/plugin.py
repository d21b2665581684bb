"""The entry point of `vllm.general_plugins`: vLLM calls `register` in every process that it starts, perhaps often.

vLLM swallows an error while importing this module but not one raised inside `register`, so vLLM is imported there only.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points

logger = logging.getLogger("vllm.preft")

_registered = False  # only after everything is in place: a half-finished first call must not count


def disabled() -> bool:
    """Whether `PREFT_DISABLE=1` asks for the stock engine."""
    return os.environ.get("PREFT_DISABLE", "") not in ("", "0")


def why_inactive() -> str | None:
    """Why vLLM would not load this plugin, told without importing vLLM; None if it would."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if disabled():
        return "PREFT_DISABLE is set"
    if allowed is not None and "preft" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves preft out"
    if "preft" not in {entry.name for entry in entry_points(group="vllm.general_plugins")}:
        return "this environment has no entry point of preft, install preft with pip"
    return None


def register() -> None:
    """Check vLLM and put the rule into it; safe to call again.

    Raises:
        PreftError: this vLLM is not one that was tested.
    """
    global _registered
    if _registered:
        return
    if disabled():
        logger.warning("PREFT_DISABLE is set: this is the stock engine, it serves no prefill-only adapters")
        return
    from vllm.platforms import current_platform

    from engine_patch import contract

    on_cpu = current_platform.is_cpu()
    contract.check(
        contract.ENGINE_SYMBOLS + (contract.V1_SYMBOLS if on_cpu else contract.V2_SYMBOLS + contract.CUDA_SYMBOLS)
    )
    from engine_patch import prefix_cache, proved, readiness, scheduler, status
    from engine_patch.pool import manager

    manager.patch()
    readiness.patch()
    proved.patch()
    prefix_cache.patch()
    scheduler.patch()
    if on_cpu:
        from engine_patch.kernels import cpu
        from engine_patch.runners import v1

        v1.patch()
        cpu.patch()
    else:
        from engine_patch.kernels import gpu
        from engine_patch.runners import graphs, v2

        v2.patch()
        graphs.patch()
        gpu.patch()
    status.patch()
    _registered = True


def registered() -> bool:
    """Whether everything is in place in this process."""
    return _registered
