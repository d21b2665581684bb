"""Which CUDA graphs the V2 runner captures.

Upstream: every graph is captured twice, without adapters and with, which makes a server start much later. Needed: graphs of
decode steps only without, since prefill-only adapters do not act there (the few such steps that have an adapter after all, in a
prompt of one token, replay the graphs of mixed steps); and of mixed steps with adapters fewer sizes, since they are the rare
ones. An engine that is told of all-token adapters keeps all graphs. Still fits while `CudaGraphManager` keeps what it may
capture in `_capture_descs`, and finds what it may replay in `_candidates`, the smallest first (see `contract.py`).
"""

from __future__ import annotations

from typing import Any

from engine_patch.patching import replace

OPTION = "all_token_adapters"
"""In `additional_config["preft"]`: adapters that act on decoded tokens are expected."""

NEXT_SIZE = 0.8
"""Of graphs with adapters: each size is at most this part of the next larger one, so a step is padded by a quarter at most."""


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
    with_adapters = {
        desc.num_tokens
        for descs in manager._capture_descs.values()
        for desc in descs
        if desc.num_active_loras > 0 and not _is_decode(desc)
    }
    sizes = keep_sizes(with_adapters)

    def stays(desc: Any) -> bool:
        return desc.num_active_loras == 0 or (desc.num_tokens in sizes and not _is_decode(desc))

    for mode, descs in list(manager._capture_descs.items()):
        manager._capture_descs[mode] = [desc for desc in descs if stays(desc)]
        if not manager._capture_descs[mode]:
            del manager._capture_descs[mode]
    for num_tokens, adapters in list(manager._candidates):
        found = [desc for desc in manager._candidates[num_tokens, adapters] if stays(desc)]
        if not found and (left := [size for size in sizes if size >= num_tokens]):
            found = [
                desc
                for desc in manager._candidates[min(left), adapters]
                if stays(desc) and desc.num_tokens == min(left)
            ]
        manager._candidates[num_tokens, adapters] = found


def keep_sizes(sizes: set[int]) -> set[int]:
    """The largest, and then each that is at most `NEXT_SIZE` of the one kept before it."""
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or size <= NEXT_SIZE * kept[-1]:
            kept.append(size)
    return set(kept)


def _is_decode(desc: Any) -> bool:
    return desc.uniform_token_count is not None or desc.max_query_len is not None
