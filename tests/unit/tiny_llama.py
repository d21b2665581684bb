"""A tiny Llama with twelve layers (so that layer 1 meets layers 10 and 11), and adapters for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine_patch.adapter import Adapter, LowRankPair
from preft_cli.adapters.base import BaseFacts
from preft_cli.models import BaseModel

LAYERS = 12
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "vocab_size": 64}


def llama(**changes: Any) -> Any:
    """A random LlamaForCausalLM."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1, **changes})
    return LlamaForCausalLM(config)


def save_base(folder: Path, **changes: Any) -> BaseModel:
    """The model in a folder, as a user's local base model."""
    llama(**changes).save_pretrained(folder)
    return BaseModel(str(folder), folder)


def save_peft(folder: Path, base: BaseModel, seed: int = 1, **lora: Any) -> Any:
    """A PEFT LoRA with random A and B, saved by PEFT itself; returns the PEFT model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base.path)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **lora})
    peft_model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    peft_model.save_pretrained(folder)
    return peft_model


def random_adapter(
    base: BaseFacts, method: str = "lorap", rank: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Adapter:
    """Random pairs on every linear layer, alpha = 2 * rank."""
    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    pairs = {
        name: LowRankPair(weights(rank, size_in), weights(size_out, rank), 2.0)
        for name, (size_in, size_out) in base.shapes.items()
    }
    return Adapter(method, base.fingerprint, pairs, {"base_model": base.name, "chat_template_digest": "abc", "step": 3})


def assert_same(first: Adapter, second: Adapter) -> None:
    """Equal to the last bit, dtype included."""
    assert first.pairs.keys() == second.pairs.keys()
    for name, pair in first.pairs.items():
        other = second.pairs[name]
        assert pair.scaling == other.scaling, name
        assert pair.a.dtype == other.a.dtype, name
        assert pair.tensors.keys() == other.tensors.keys(), name
        for which, tensor in pair.tensors.items():
            assert torch.equal(tensor, other.tensors[which]), (name, which)
