"""The prompt mask: an update that acts on the prompt and nowhere else.

A position is adapted by where it stands, never by which token stands there.
"""

from __future__ import annotations

from torch import Tensor


class PromptMask:
    """Holds the mask of the current batch, for every layer that is adapted.

    The mask stays set until the next batch replaces it: gradient checkpointing runs the forward pass once more during
    backward, when a context manager around the first forward pass would long have ended.
    """

    def __init__(self) -> None:
        self._mask_BT1: Tensor | None = None

    def set(self, mask_BT: Tensor) -> None:
        """From now on adapt the positions where `mask_BT` (bool, `[batch, tokens]`) is true."""
        self._mask_BT1 = mask_BT.bool().unsqueeze(-1)

    def hide(self, x_BTD: Tensor) -> Tensor:
        """`x_BTD` (`[batch, tokens, width]`) with zeros where nothing is adapted.

        Raises:
            RuntimeError: no mask is set, or one of another shape: the update would act somewhere in silence.
        """
        if self._mask_BT1 is None or self._mask_BT1.shape[:2] != x_BTD.shape[:2]:
            raise RuntimeError(f"no prompt mask is set for a batch of shape {list(x_BTD.shape[:2])}")
        return x_BTD.masked_fill(~self._mask_BT1, 0)
