"""What is minimised: cross-entropy of the completion and its EOS, with the adapter on the prompt."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from preft_cli.methods.adapted import AdaptedModel
from preft_cli.training.collate import IGNORE


class LossSum(NamedTuple):
    """Summed, not averaged, so that batches can be added up in any order."""

    total: Tensor
    """Scalar, float32, with gradient."""
    num_tokens: int
    """Completion tokens it sums over."""


class Objective:
    """Binds the loss to one adapted model: its prompt mask is that of the batch, and its LM head sees labels alone."""

    def __init__(self, adapted: AdaptedModel) -> None:
        self._adapted = adapted
        self._head = LabelPositions()
        self._head.attach(adapted.model.get_output_embeddings())

    def __call__(self, batch: dict[str, Tensor], model: Any = None) -> LossSum:
        """The loss of one batch of `Collator`. `model` is the model as the trainer wraps it, if it does."""
        self._adapted.mask.set(batch["prompt_mask"])
        # A position predicts the token after it.
        targets_BT = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
        learnt_BT = targets_BT != IGNORE
        self._head.select(learnt_BT)
        logits_1NV = (model or self._adapted.model)(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
            use_cache=False,
        ).logits
        targets_N = targets_BT[learnt_BT]
        total = F.cross_entropy(logits_1NV[0].float(), targets_N, reduction="sum")
        return LossSum(total, targets_N.numel())


class LabelPositions:
    """Lets the LM head see only the positions that have a label.

    The vocabulary is large and prompts are long: most of the head's work would be for logits that no loss reads. The
    model's own forward pass still does whatever it does to logits, such as soft-capping.
    """

    def __init__(self) -> None:
        self._selected_BT: Tensor | None = None

    def select(self, selected_BT: Tensor) -> None:
        """In the next forward pass the head computes `[1, number of true positions, vocabulary]`."""
        self._selected_BT = selected_BT

    def attach(self, head: nn.Module) -> None:
        """Put the selection in front of `head`."""
        head.register_forward_pre_hook(self._hook)

    def _hook(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        selected_BT, self._selected_BT = self._selected_BT, None
        if selected_BT is None:
            return None
        (hidden_BTD,) = args
        return (hidden_BTD[selected_BT].unsqueeze(0),)
