"""Keys of KV blocks: the content of the adapter, and how many of the block's positions it acted on.

Upstream: a block is keyed by its token ids and, with an adapter, by the adapter's name and path. Needed: by method and
content, so that new weights under an old name never meet old KV and two names of one content share it; and by phase, since a
block with sampled tokens was computed without the adapter there, while the same ids in a later prompt are prompt and hence
adapted. Still fits while every key is made by `generate_block_hash_extra_keys`, which the three `MODULES` bind by name, and
it asks `_gen_lora_extra_hash_keys` (see `contract.py`).
"""

from __future__ import annotations

import importlib
from typing import Any

from engine_patch.patching import replace
from engine_patch.ref import parse_ref
from engine_patch.rule import num_adapted

MODULES = (
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.block_pool",
    "vllm.v1.simple_kv_offload.manager",
)


def patch() -> None:
    """Put content and phase into the keys, wherever they are made."""
    modules = [importlib.import_module(name) for name in MODULES]
    replace(modules[0], "_gen_lora_extra_hash_keys", make_content_keys)
    for module in modules:
        replace(module, "generate_block_hash_extra_keys", make_block_keys)


def make_content_keys(upstream: Any) -> Any:
    """Replaces the adapter's part of a key. Upstream publishes the second item of each in its KV events."""

    def _gen_lora_extra_hash_keys(request: Any) -> list[tuple[str, ...]]:
        ref = request.lora_request and parse_ref(request.lora_request.lora_path)
        if not ref:
            keys: list[tuple[str, ...]] = upstream(request)
            return keys
        return [("preft", f"{ref.method}:{ref.digest}")]

    return _gen_lora_extra_hash_keys


def make_block_keys(upstream: Any) -> Any:
    """Adds what sets a block apart from a block of prompt."""

    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> Any:
        keys, next_mm_idx = upstream(request, start_token_idx, end_token_idx, start_mm_idx)
        ref = request.lora_request and parse_ref(request.lora_request.lora_path)
        if ref and ref.prefill_only and (phase := phase_key(request.num_prompt_tokens, start_token_idx, end_token_idx)):
            keys = (*keys, phase)
        return keys, next_mm_idx

    return generate_block_hash_extra_keys


def phase_key(num_prompt_tokens: int, start: int, end: int) -> tuple[str, int] | None:
    """How many of the positions `start .. end - 1` the adapter acted on; None if on all of them, as in every prompt."""
    if num_prompt_tokens >= end:
        return None
    return "preft_adapted", int(num_adapted(num_prompt_tokens, start, end - start))
