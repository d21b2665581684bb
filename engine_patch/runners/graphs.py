"""Which CUDA graphs the V2 runner captures.

Upstream: every graph is captured twice, without adapters and with. Needed: graphs of decode steps only without, since
prefill-only adapters do not act there; the few such steps that have an adapter after all (a prompt of one token) replay the
graphs of mixed steps. An engine that is told of all-token adapters keeps all graphs. Still fits while `CudaGraphManager` keeps
what it may capture in `_capture_descs` and what it may replay in `_candidates` (see `contract.py`).
"""

from __future__ import annotations

from typing import Any

from engine_patch.patching import replace

OPTION = "all_token_adapters"
"""In `additional_config["preft"]`: adapters that act on decoded tokens are expected."""


def patch() -> None:
    """Wrap `CudaGraphManager._init_candidates`."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    def make(upstream: Any) -> Any:
        def _init_candidates(self: Any) -> None:
            upstream(self)
            extra = self.vllm_config.additional_config
            if not (isinstance(extra, dict) and extra.get("preft", {}).get(OPTION)):
                drop_decode_graphs_with_adapters(self)

        return _init_candidates

    replace(CudaGraphManager, "_init_candidates", make)


def drop_decode_graphs_with_adapters(manager: Any) -> None:
    """Capture and replay graphs of decode steps alone only without adapters."""
    for found in (manager._capture_descs, manager._candidates):
        for key, descs in list(found.items()):
            found[key] = [desc for desc in descs if not _is_decode_with_adapters(desc)]
            if not found[key]:
                del found[key]


def _is_decode_with_adapters(desc: Any) -> bool:
    is_decode = desc.uniform_token_count is not None or desc.max_query_len is not None
    return is_decode and desc.num_active_loras > 0
