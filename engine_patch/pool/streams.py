"""Where DiReFT acts in the engine: behind every decoder block.

Upstream: adapters act on linear layers only. Needed: `hidden += W2^T (W1 (hidden + residual) + b)` for adapted tokens, between
two decoder blocks. Still fits while a block returns (hidden, residual), whose sum is the residual stream
(`contract.DECODER_SYMBOLS`), and torch.compile traces modules with their hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine_patch import contract
from engine_patch.errors import PreftError
from engine_patch.residual import DECODER_LAYERS, decoder_blocks, stream_of


class ResidualStream(nn.Module):
    """The stream after one decoder block. The pool's `attach` treats it like one of vLLM's wrapped layers."""

    lora_a_stacked: tuple[torch.Tensor, ...] = ()
    lora_b_stacked: tuple[torch.Tensor, ...] = ()

    def __init__(self, punica_wrapper: Any, width: int) -> None:
        super().__init__()
        self.punica_wrapper, self.width = punica_wrapper, width
        self.output_slices = (width,)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> None:
        """Let the adapters of the step's tokens act on `hidden`, `[num_tokens, width]`, in place."""
        self.punica_wrapper.add_intervention(hidden, residual, self.lora_a_stacked, self.lora_b_stacked)


def hook_streams(manager: Any, declared: bool) -> dict[str, ResidualStream]:
    """The streams of a model whose layers vLLM's `manager` has wrapped, by name; none if its architecture is not known.

    Args:
        manager: `LoRAModelManager`.
        declared: the user says that the blocks of this architecture return (hidden, residual), whose sum is the stream.

    Raises:
        PreftError: decoder blocks that are not those which were tested, or a declared model of which nobody can tell its blocks.
    """
    whole = manager.model.config
    config = whole.get_text_config() if hasattr(whole, "get_text_config") else whole  # of a multimodal model
    blocks = decoder_blocks(manager.model, getattr(config, "num_hidden_layers", 0))
    kinds = {type(block).__name__ for block in blocks.values()}
    if kinds == {DECODER_LAYERS.get(config.model_type)}:
        contract.check(tuple(one for one in contract.DECODER_SYMBOLS if one.name.partition(".")[0] in kinds))
    elif not declared:
        return {}
    elif not blocks:
        raise PreftError(
            f"model.residual_stream: {type(manager.model).__name__} has no list of decoder blocks to adapt"
        )
    streams = {}
    for name, block in blocks.items():
        block.preft_stream = ResidualStream(manager._get_punica_wrapper(name), config.hidden_size)
        block.register_forward_hook(_intervene)
        streams[stream_of(name)] = block.preft_stream
    return streams


def _intervene(block: Any, args: Any, output: Any) -> None:
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], torch.Tensor)):
        raise PreftError(f"{type(block).__name__} does not return (hidden, residual): DiReFT cannot act on it")
    block.preft_stream(*output)
