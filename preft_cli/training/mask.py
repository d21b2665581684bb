"""The prompt mask: LoRA that acts on the prompt and nowhere else.

    y_i = W x_i + m_i (alpha/r) B A x_i        m_i = 1 if position i < number of prompt tokens, else 0

PEFT computes the update as `lora_B(lora_A(dropout(x)))`, and neither has a bias, so zeroing the rows of x in front of
`lora_A` is the whole of it. A position is adapted by where it stands, never by which token stands there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engine_patch.rule import num_adapted


class PromptMask:
    """Holds the mask of the current batch and applies it in front of every `lora_A` of a model.

    The mask stays set until the next batch replaces it: gradient checkpointing runs the forward pass once more during
    backward, when a context manager around the first forward pass would long have ended.
    """

    def __init__(self) -> None:
        self._mask_BT1: Tensor | None = None

    def set(self, mask_BT: Tensor) -> None:
        """From now on adapt the positions where `mask_BT` (bool, `[batch, tokens]`) is true."""
        self._mask_BT1 = mask_BT.bool().unsqueeze(-1)

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Put the mask in front of every `lora_A` linear layer of `model`.

        Raises:
            ValueError: when there is none; the adapter would act on all tokens in silence.
        """
        layers = [module for name, module in model.named_modules() if _is_lora_a(name, module)]
        if not layers:
            raise ValueError("the model has no lora_A linear layer to put the prompt mask in front of")
        return [layer.register_forward_pre_hook(self._hide_completion) for layer in layers]

    def _hide_completion(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        (x_BTI,) = args
        if self._mask_BT1 is None or self._mask_BT1.shape[:2] != x_BTI.shape[:2]:
            raise RuntimeError(f"no prompt mask is set for a batch of shape {list(x_BTI.shape[:2])}")
        return (x_BTI.masked_fill(~self._mask_BT1, 0),)


def _is_lora_a(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and "lora_A" in name.split(".")


def prompt_mask(num_prompt_tokens: list[int], starts: list[int], length: int) -> Tensor:
    """The mask `[batch, length]` of rows that begin at the columns `starts` (0 unless padded on the left)."""
    mask_BT = torch.zeros(len(starts), length, dtype=torch.bool)
    for row, (prompt, start) in enumerate(zip(num_prompt_tokens, starts, strict=True)):
        mask_BT[row, start : start + int(num_adapted(prompt, 0, length - start))] = True
    return mask_BT
