"""PEFT's tensor names, and what the foreign ones among them mean."""

from __future__ import annotations

import re
from typing import NamedTuple

PREFIX = "base_model.model."

# `.default.` (or another adapter's name) stays in the names when a state dict is saved without PEFT's own method.
_LORA = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")

# First match wins: (part of a tensor's name, what it is, what to do about it).
_FOREIGN = (
    ("lora_magnitude_vector", "DoRA", "train it again with use_dora: false"),
    ("lora_embedding_", "LoRA on the embeddings", "train it again on linear layers only"),
    ("trainable_tokens", "trained token embeddings", "train it again without trainable_token_indices"),
    ("modules_to_save", "modules_to_save", "train it again without modules_to_save"),
    (".base_layer.", "base model weights", "save only the adapter (model.save_pretrained of PEFT)"),
    ("embed_tokens", "added tokens (a resized vocabulary)", "train it again without adding tokens"),
    ("lm_head", "added tokens (a resized vocabulary)", "train it again without adding tokens"),
    ("ia3_", "IA3", "only LoRA can be served"),
    ("vera_", "VeRA", "only LoRA can be served"),
    (".bias", "trained bias", 'train it again with bias: "none" and lora_bias: false'),
)


class LoraName(NamedTuple):
    """A tensor name taken apart."""

    module: str
    part: str
    """A or B."""
    adapter: str | None
    """The adapter's name if the tensor's name carries one, such as `default`."""


def parse(name: str) -> LoraName | None:
    """`base_model.model.<module>.lora_A.weight` and its variants; None for any other tensor."""
    match = _LORA.fullmatch(name)
    if match is None or ".base_layer" in name or "modules_to_save" in name:
        return None
    return LoraName(match["module"], match["part"], match["adapter"])


def tensor_name(module: str, part: str) -> str:
    """The name under which PEFT saves one half of a module's LoRA pair."""
    return f"{PREFIX}{module}.lora_{part}.weight"


def explain_foreign(name: str) -> str:
    """Why a tensor that is no LoRA pair cannot be served, by the feature's name, with the remedy."""
    for fragment, feature, remedy in _FOREIGN:
        if fragment in name:
            return f"{feature} cannot be served (tensor {name}): {remedy}"
    return f"unknown tensor {name}: only lora_A and lora_B weights of linear layers can be served"
