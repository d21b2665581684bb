"""Which CUDA graphs the V2 runner captures.

Upstream: every graph is captured twice, without adapters and with, which makes a server start much later. Needed: graphs of
decode steps only without, since prefill-only adapters do not act there (the few such steps that have an adapter after all, in a
prompt of one token, replay the graphs of mixed steps, or none); and of mixed steps with adapters fewer sizes, since they are the
rare ones. An engine that is told of all-token adapters keeps all graphs. Still fits while `CudaGraphManager` keeps what it may
capture in `_capture_descs`, and finds what it may replay in `_candidates`, the smallest first (see `contract.py`).
"""

from __future__ import annotations

from typing import Any

from engine_patch.patching import replace

OPTION = "all_token_adapters"
"""In `additional_config["preft"]`: adapters that act on decoded tokens are expected."""

NEXT_SIZE = 0.8
"""Of graphs with adapters: each size is at most this part of the next larger; that adds a quarter at most to vLLM's padding."""


def patch() -> None:
    """Wrap `CudaGraphManager._init_candidates`."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    def make(upstream: Any) -> Any:
        def _init_candidates(self: Any) -> None:
            upstream(self)
            extra = self.vllm_config.additional_config
            if not (isinstance(extra, dict) and extra.get("preft", {}).get(OPTION)):
                thin_out(self)

        return _init_candidates

    replace(CudaGraphManager, "_init_candidates", make)


def thin_out(manager: Any) -> None:
    """Leave out graphs with adapters of decode steps alone, and most sizes of the others."""
    mixed = [
        desc
        for descs in manager._capture_descs.values()
        for desc in descs
        if desc.num_active_loras > 0 and not _is_decode(desc)
    ]
    sizes = keep_sizes({desc.num_tokens for desc in mixed})
    kept = [desc for desc in mixed if desc.num_tokens in sizes]  # of one mode, the largest first
    for mode, descs in manager._capture_descs.items():
        manager._capture_descs[mode] = [desc for desc in descs if desc.num_active_loras == 0 or desc in kept]
    for num_tokens, adapters in manager._candidates:
        if adapters > 0:
            fit = [desc for desc in kept if desc.num_active_loras == adapters and desc.num_tokens >= num_tokens]
            manager._candidates[num_tokens, adapters] = fit[-1:]


def keep_sizes(sizes: set[int]) -> set[int]:
    """The largest, and then each that is at most `NEXT_SIZE` of the one kept before it."""
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or size <= NEXT_SIZE * kept[-1]:
            kept.append(size)
    return set(kept)


def _is_decode(desc: Any) -> bool:
    return desc.uniform_token_count is not None or desc.max_query_len is not None
