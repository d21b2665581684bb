"""How much memory an engine takes, worked out from the model's config before anything is loaded."""

from __future__ import annotations

import math
from typing import NamedTuple

from engine_patch.pool.limits import with_room_ahead
from preft_cli.bench.arms import ARMS
from preft_cli.bench.plan import CPU_BLOCK_SIZE, ArmPlan, BenchPlan
from preft_cli.models import BaseModel
from preft_cli.models.modules import modules_of

OVERHEAD: dict[str, int] = {"gpu": 4 << 30, "cpu": 1 << 30}
"""Bytes for activations, captured graphs, and what the libraries take."""

MIN_KV_CACHE = 64 * 2**20

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "torch.float32": 4, "torch.float16": 2, "torch.bfloat16": 2}


class Footprint(NamedTuple):
    """Bytes of one device."""

    weights: int
    kv_cache: int
    adapters: int
    overhead: int

    @property
    def total(self) -> int:
        return sum(self)


class ModelSizes(NamedTuple):
    """What counts of a model."""

    num_parameters: int
    linear_features: int
    """Sum of in and out features of all linear layers: a LoRA of rank r has r times as many parameters."""
    stream_features: int
    """The same of the residual streams."""
    vocab_size: int
    token_elements: int
    """Elements of K and V of one token, over all layers."""
    kv_heads: int
    item_bytes: int
    """Of one element, in the type that the engine computes in."""

    @classmethod
    def of(cls, base: BaseModel, plan: BenchPlan) -> ModelSizes:
        """Read from the model's config; no weights are loaded."""
        import torch
        from transformers import AutoModelForCausalLM

        text = base.hf_config.get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(base.hf_config)
        modules = modules_of(base, plan.residual_stream)
        heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        dtype = plan.arms[0].engine_args["dtype"]
        own = str(text.dtype or base.hf_config.dtype or "float32")
        return cls(
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            linear_features=sum(map(sum, modules.linear.values())),
            stream_features=sum(map(sum, modules.streams.values())),
            vocab_size=text.vocab_size,
            token_elements=2 * text.num_hidden_layers * heads * head_dim,
            kv_heads=heads,
            item_bytes=ITEM_BYTES.get(own if dtype == "auto" else dtype, 4),
        )


def kv_cache_bytes(sizes: ModelSizes, num_seqs: int, longest: int, workers: int) -> int:
    """Bytes of KV cache of one device that hold `num_seqs` requests of `longest` tokens, with a tenth to spare."""
    blocks = math.ceil(longest / CPU_BLOCK_SIZE) * num_seqs + 1
    token_bytes = sizes.token_elements * sizes.item_bytes // min(workers, sizes.kv_heads)
    return max(MIN_KV_CACHE, math.ceil(1.1 * blocks * CPU_BLOCK_SIZE * token_bytes))


def footprint(arm: ArmPlan, plan: BenchPlan, sizes: ModelSizes, kv_cache: int) -> Footprint:
    """What the arm's engine takes on each of its devices."""
    workers: int = arm.engine_args["tensor_parallel_size"]
    step_bytes = arm.engine_args.get("max_loras", 0) * slot_bytes(arm, sizes) // workers
    return Footprint(
        weights=sizes.num_parameters * sizes.item_bytes // workers,
        kv_cache=kv_cache,
        adapters=with_room_ahead(step_bytes) if ARMS[arm.arm].plugin else step_bytes,
        overhead=OVERHEAD[plan.device],
    )


def slot_bytes(arm: ArmPlan, sizes: ModelSizes) -> int:
    """Bytes of one adapter slot. All slots of the stock engine have the size of the largest adapter, LM head included."""
    features = sizes.stream_features if "direft" in arm.arm else sizes.linear_features
    if arm.adapters == "peft":
        features += 2 * sizes.vocab_size
    return int(features * arm.engine_args.get("max_lora_rank", 0) * sizes.item_bytes)
