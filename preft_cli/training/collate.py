"""Rows to one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from preft_cli.data.turn import Row
from preft_cli.training.arrange import arrange
from preft_cli.training.packed import IGNORE, pack


@dataclass(frozen=True)
class Collator:
    """Pads sequences to the longest one. Neither the side nor the rest of the batch changes what a row computes."""

    pad_id: int = 0
    """Any id: padding is hidden by the attention mask and never looked at by value."""
    side: Literal["right", "left"] = "right"
    share_prompts: bool = False
    """Compute once what rows have in common at the beginning of their prompts."""
    pair_cost: float = 0.0
    """See `arrange`."""

    def __call__(self, items: Sequence[Row | list[Row] | None]) -> dict[str, Tensor]:
        """`items` are rows, or for each sequence the rows in it (`pack_all`). None is no row (`WithBlank`).

        Returns:
            `input_ids, position_ids, labels, prompt_mask, predicted_by`, each `[sequences, longest]`, as in `Packed`, and
            `attention_mask` (1: no padding); `row_tokens` `[sequences]`, what its rows would have each by itself. Where a
            sequence has more than one row, `seen_until` too.
        """
        if all(item is None for item in items):
            return self._blank()
        sequences = [item for item in items if isinstance(item, list)]
        rows = [item for item in items if isinstance(item, Row)]
        if rows:
            sequences += arrange(rows, self.pair_cost) if self.share_prompts else [[row] for row in rows]
        packed = [pack(sequence, share=self.share_prompts) for sequence in sequences]
        length = max(map(len, packed))
        starts_B1 = torch.tensor([length - len(one) if self.side == "left" else 0 for one in packed])[:, None]

        def padded(tensors: Sequence[Tensor], fill: int) -> Tensor:
            batch_BT = torch.full((len(packed), length), fill, dtype=tensors[0].dtype)
            for row_T, start, tensor in zip(batch_BT, starts_B1.flatten().tolist(), tensors, strict=True):
                row_T[start : start + len(tensor)] = tensor
            return batch_BT

        batch = {
            "input_ids": padded([one.input_ids for one in packed], self.pad_id),
            "attention_mask": padded([torch.ones_like(one.input_ids) for one in packed], 0),
            "position_ids": padded([one.position_ids for one in packed], 0),
            "labels": padded([one.labels for one in packed], IGNORE),
            "prompt_mask": padded([one.prompt_mask for one in packed], False),
            "predicted_by": padded([one.predicted_by for one in packed], 0) + starts_B1,
            "row_tokens": torch.tensor([sum(map(len, sequence)) for sequence in sequences]),
        }
        if any(len(sequence) > 1 for sequence in sequences):
            seen_until_BT = padded([one.seen_until for one in packed], 0) + starts_B1
            # Padding sees itself alone: attention over nothing at all is 0 / 0. Some kernels make zeros of it, some NaN, which
            # the next layer's weight of zero for padding would not stop from reaching every row.
            alone_T = torch.arange(1, length + 1)
            batch["seen_until"] = torch.where(batch["attention_mask"].bool(), seen_until_BT, alone_T)
        return batch

    def _blank(self) -> dict[str, Tensor]:
        """Something to compute that is nothing to learn: the other processes wait for the gradients of this one."""
        batch = self([Row([self.pad_id], [self.pad_id])])
        return batch | {"labels": batch["labels"].fill_(IGNORE), "row_tokens": torch.zeros(1, dtype=torch.long)}
