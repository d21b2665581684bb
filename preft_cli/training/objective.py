"""What is minimised: cross-entropy of the completion and its EOS, with the adapter on the prompt."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from preft_cli.methods.adapted import AdaptedModel
from preft_cli.training.packed import IGNORE, attention_mask


class LossSum(NamedTuple):
    """Summed, not averaged, so that batches can be added up in any order."""

    total: Tensor
    """Scalar, float32, with gradient."""
    num_tokens: int
    """Completion tokens it sums over."""


class Objective:
    """Binds the loss to one adapted model."""

    def __init__(self, adapted: AdaptedModel) -> None:
        self._label_logits = LabelLogits(adapted)

    def __call__(self, batch: dict[str, Tensor], model: Any = None) -> LossSum:
        """The loss of one batch of `Collator`. `model` is the model as the trainer wraps it, if it does."""
        logits_NV, targets_N = self._label_logits(batch, model)
        total = F.cross_entropy(logits_NV.float(), targets_N, reduction="sum")
        return LossSum(total, targets_N.numel())


class LabelLogits:
    """The forward pass of one adapted model: its prompt mask is that of the batch, and its LM head sees labels alone."""

    def __init__(self, adapted: AdaptedModel) -> None:
        self._adapted = adapted
        self._head = LabelPositions()
        self._head.attach(adapted.model.get_output_embeddings())

    def __call__(self, batch: dict[str, Tensor], model: Any = None) -> tuple[Tensor, Tensor]:
        """Logits `[N, vocabulary]` that predict the labels of one batch of `Collator`, and the labels `[N]`.

        In the order of the sequences, and of the columns in each. `model` is the model as the trainer wraps it, if it does.
        """
        self._adapted.mask.set(batch["prompt_mask"])
        sequence_N, column_N = (batch["labels"] != IGNORE).nonzero(as_tuple=True)
        targets_N = batch["labels"][sequence_N, column_N]
        self._head.select(sequence_N, batch["predicted_by"][sequence_N, column_N])
        seen_until_BT = batch.get("seen_until")
        logits_1NV = (model or self._adapted.model)(
            input_ids=batch["input_ids"],
            # Of two dimensions it only hides padding, and the model makes the causal mask, or none if nothing is padded.
            attention_mask=batch["attention_mask"] if seen_until_BT is None else attention_mask(seen_until_BT),
            position_ids=batch["position_ids"],
            use_cache=False,
        ).logits
        return logits_1NV[0], targets_N


class LabelPositions:
    """Lets the LM head see only the positions that predict a label, once for each of their labels.

    The vocabulary is large and prompts are long: most of the head's work would be for logits that no loss reads. The
    model's own forward pass still does whatever it does to logits, such as soft-capping.
    """

    def __init__(self) -> None:
        self._selected: tuple[Tensor, Tensor] | None = None

    def select(self, sequence_N: Tensor, column_N: Tensor) -> None:
        """In the next forward pass the head computes `[1, N, vocabulary]`: the logits of these positions."""
        self._selected = sequence_N, column_N

    def attach(self, head: nn.Module) -> None:
        """Put the selection in front of `head`."""
        head.register_forward_pre_hook(self._hook)

    def _hook(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        selected, self._selected = self._selected, None
        if selected is None:
            return None
        (hidden_BTD,) = args
        return (hidden_BTD[selected].unsqueeze(0),)
