"""The linear layers of a base model, known without its weights."""

from __future__ import annotations

from preft_cli.models.base import BaseModel


def linear_modules(base: BaseModel) -> dict[str, tuple[int, int]]:
    """The decoder's linear layers: module name -> (in_features, out_features), in the model's own order.

    Built on the meta device, so that a 70B shape costs no memory. The LM head is left out: it acts on the position
    that is sampled from and shares its weights with the embedding in many models.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base.hf_config)
    head = model.get_output_embeddings()
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
