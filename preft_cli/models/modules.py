"""What adapters can act on in a base model, known without its weights."""

from __future__ import annotations

from typing import NamedTuple

from engine_patch.residual import DECODER_LAYERS, decoder_blocks, stream_of
from preft_cli.models.base import BaseModel

Shapes = dict[str, tuple[int, int]]
"""(in_features, out_features) by module name, in the model's own order."""


class Modules(NamedTuple):
    """The places where adapters act."""

    linear: Shapes
    """The decoder's linear layers. The LM head is left out: it acts on the position that is sampled from and shares its
    weights with the embedding in many models."""
    streams: Shapes
    """The residual streams after the decoder blocks; none if the architecture's is not known."""


def modules_of(base: BaseModel, declared: bool = False) -> Modules:
    """The places where adapters act in `base`. Built on the meta device, so that a 70B shape costs no memory.

    Args:
        base: the model.
        declared: `model.residual_stream`: its residual streams are what they seem, whatever its architecture.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base.hf_config)
    head = model.get_output_embeddings()
    linear = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    config = base.hf_config.get_text_config()
    known = declared or config.model_type in DECODER_LAYERS
    blocks = decoder_blocks(model, config.num_hidden_layers) if known else {}
    return Modules(linear, {stream_of(name): (config.hidden_size, config.hidden_size) for name in blocks})
