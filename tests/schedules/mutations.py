"""Faults planted on purpose: each must make the schedules fail. Some are upstream's own, back by leaving our patch out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine_patch import prefix_cache, rule
from engine_patch.kernels import cpu
from engine_patch.runners import token_map, v1
from tests.schedules import models


def _off_by_one() -> None:
    """The last token of the prompt is taken for a sampled one."""

    def num_adapted(num_prompt_tokens: Any, start: Any, count: Any) -> Any:
        return rule.num_adapted(num_prompt_tokens - 1, start, count)

    token_map.num_adapted = num_adapted  # type: ignore[attr-defined]
    prefix_cache.num_adapted = num_adapted  # type: ignore[attr-defined]


def _phase_by_step() -> None:
    """As the published fork decides: a request with several tokens in a step is in prefill, one with one token decodes."""

    def adapted_counts(prefill_only: Any, num_prompt: Any, num_computed: Any, num_scheduled: Any) -> Any:
        return np.where(prefill_only & (num_scheduled == 1), 0, num_scheduled)

    v1.adapted_counts = adapted_counts  # type: ignore[attr-defined]


def _name_keyed() -> None:
    """Blocks are keyed by the adapter's name alone."""
    prefix_cache.make_content_keys = lambda upstream: (
        lambda request: (  # type: ignore[attr-defined]
            [("lora", request.lora_request.lora_name)] if request.lora_request else []
        )
    )


def _no_phase() -> None:
    """Upstream's fault: a block with sampled tokens has the key of a block of prompt."""
    prefix_cache.phase_key = lambda num_prompt_tokens, start, end: None  # type: ignore[attr-defined]


def _stock_cache() -> None:
    """Upstream's prefix cache, untouched."""
    prefix_cache.make_content_keys = prefix_cache.make_block_keys = lambda upstream: upstream  # type: ignore[attr-defined]


def _stock_cpu_kernels() -> None:
    """Upstream's LoRA on CPU for linear layers: it gives tokens without an adapter the weights of the last slot.

    With all-token adapters, since its buffers cannot hold the two segments that a prefill-only request can have.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    cpu.SegmentPunicaWrapper.update_metadata = PunicaWrapperCPU.update_metadata
    cpu.SegmentPunicaWrapper.add_lora_linear = PunicaWrapperCPU.add_lora_linear
    models.METHODS = ("lora",) * len(models.RANKS)


MUTATIONS: dict[str, Callable[[], None]] = {
    "off-by-one": _off_by_one,
    "phase-by-step": _phase_by_step,
    "name-keyed": _name_keyed,
    "no-phase": _no_phase,
    "stock-cache": _stock_cache,
    "stock-cpu-kernels": _stock_cpu_kernels,
}
