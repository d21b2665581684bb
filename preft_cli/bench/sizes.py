"""What the workload needs of the model: positions and KV cache."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from preft_cli.bench.plan import CPU_BLOCK_SIZE, KV_CACHE_VARIABLE, BenchPlan
from preft_cli.errors import UserError
from preft_cli.models import BaseModel

MIN_KV_CACHE = 64 * 2**20


def model_config(base: BaseModel) -> dict[str, Any]:
    """The text model's part of config.json."""
    config: dict[str, Any] = json.loads((base.path / "config.json").read_text())
    return {**config, **config.get("text_config", {})}


def vocab_size(base: BaseModel) -> int:
    """Token ids of prompts are below this."""
    size: int = model_config(base)["vocab_size"]
    return size


def check_lengths(plan: BenchPlan, base: BaseModel) -> None:
    """Refuse requests that are longer than the model allows."""
    limit = model_config(base).get("max_position_embeddings")
    if limit is not None and plan.prompt_len + plan.output_len > limit:
        asked = plan.prompt_len + plan.output_len
        raise UserError(f"bench.prompt_len + output_len is {asked}; {plan.model} allows {limit} tokens", exit_code=2)


def kv_cache_bytes(plan: BenchPlan, max_num_seqs: int, base: BaseModel) -> int | None:
    """Bytes of KV cache that hold all requests that run at once; None where the engine or the user decides."""
    if plan.device != "cpu" or os.environ.get(KV_CACHE_VARIABLE):
        return None
    config = model_config(base)
    heads: int = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers: int = config["num_hidden_layers"]
    token_bytes = 2 * layers * heads * head_dim * 4  # K and V, at most float32
    blocks = math.ceil((plan.prompt_len + plan.output_len) / CPU_BLOCK_SIZE) * min(max_num_seqs, plan.num_requests) + 1
    return max(MIN_KV_CACHE, math.ceil(1.1 * blocks * CPU_BLOCK_SIZE * token_bytes))
