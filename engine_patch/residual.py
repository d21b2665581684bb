"""The residual stream after a decoder block: what DiReFT acts on. No torch here.

An intervention, `h <- h + W2^T (W1 h + b)` (Wu et al. 2024, arXiv 2404.03592), is a low-rank pair on that stream, as LoRA is one
on a linear layer. vLLM's decoder layers of the families below return (hidden, residual) before they are added, so the stream is
their sum; those of Transformers return the stream itself.
"""

from __future__ import annotations

from typing import Any

DECODER_LAYERS = {"llama": "LlamaDecoderLayer", "qwen2": "Qwen2DecoderLayer", "qwen3": "Qwen3DecoderLayer"}
"""By `model_type` of the base model's config, vLLM's class of decoder layers that is known to return (hidden, residual)."""

SUFFIX = "residual"


def stream_of(block: str) -> str:
    """`model.layers.3` -> `model.layers.3.residual`, the name of the stream after that block."""
    return f"{block}.{SUFFIX}"


def is_stream(name: str) -> bool:
    """Whether a module's name stands for a residual stream."""
    return name.rpartition(".")[2] == SUFFIX


def block_of(stream: str) -> str:
    """The inverse of `stream_of`."""
    return stream.removesuffix(f".{SUFFIX}")


def decoder_blocks(model: Any, num_layers: int) -> dict[str, Any]:
    """The decoder blocks of a model of vLLM's or Transformers', by name; empty if it is not clear which they are.

    Args:
        model: `torch.nn.Module`.
        num_layers: of its config.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "layers" and hasattr(module, "__len__") and len(module) == num_layers
    ]
    if len(lists) != 1:
        return {}
    ((name, layers),) = lists
    return {f"{name}.{index}": block for index, block in enumerate(layers)}


def unknown(model_type: str | None) -> str:
    """Why no DiReFT adapter is served or trained on a base model of this type, and what to do."""
    if own := DECODER_LAYERS.get(model_type or ""):
        which = f"of a {model_type!r} model it is known only where its decoder layers are one list of vLLM's {own}"
    else:
        which = f"that of the architecture {model_type!r} is not known (known: {', '.join(DECODER_LAYERS)})"
    return (
        f"DiReFT acts on the residual stream, and {which}; if vLLM's decoder layers of it return (hidden, residual), whose"
        " sum is the stream, say so with model.residual_stream: true"
    )
