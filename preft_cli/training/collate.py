"""Rows to one padded batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine_patch.rule import num_adapted
from preft_cli.data.turn import Row

IGNORE = -100
"""The label of positions that are not learnt, by PyTorch's convention."""


@dataclass(frozen=True)
class Collator:
    """Pads rows to the longest one. Neither the side nor the other rows of the batch change what a row computes."""

    pad_id: int = 0
    """Any id: padding is hidden by the attention mask and never looked at by value."""
    side: Literal["right", "left"] = "right"

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        """`input_ids, attention_mask, position_ids, labels, prompt_mask`, each `[batch, longest row]`."""
        length = max(map(len, rows))
        starts = [length - len(row) if self.side == "left" else 0 for row in rows]
        input_ids = torch.full((len(rows), length), self.pad_id)
        labels = torch.full_like(input_ids, IGNORE)
        attention_mask = torch.zeros_like(input_ids)
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            middle, end = start + len(row.prompt_ids), start + len(row)
            input_ids[index, start:end] = torch.tensor(row.prompt_ids + row.completion_ids)
            labels[index, middle:end] = torch.tensor(row.completion_ids)
            attention_mask[index, start:end] = 1
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "labels": labels,
            "prompt_mask": prompt_mask([len(row.prompt_ids) for row in rows], starts, length),
        }


def prompt_mask(num_prompt_tokens: list[int], starts: list[int], length: int) -> Tensor:
    """The mask `[batch, length]` of rows that begin at the columns `starts` (0 unless padded on the left)."""
    mask_BT = torch.zeros(len(starts), length, dtype=torch.bool)
    for row, (prompt, start) in enumerate(zip(num_prompt_tokens, starts, strict=True)):
        mask_BT[row, start : start + int(num_adapted(prompt, 0, length - start))] = True
    return mask_BT
