"""Rows laid into one sequence in which each sees its own prompt and completion, and nothing else.

What rows have in common at the beginning of their prompts is there once. A position of a prompt is adapted and sees what is
before it in that prompt alone, so its states are the same whatever comes after it: in another row, in another turn of the
conversation, or in a completion. The rows form a tree of prompt tokens from which completions hang like leaves,

    "How are"  " you?"  [Fine.]  [Well!]        two completions of one prompt
               " they?" [Gone.]                 and another prompt that begins alike

written depth first. What hangs from a token then lies in the columns behind it without a gap, so one number a column says
all about attention: the first column that does not see it any more.

Shapes: B sequences, T columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_patch.rule import num_adapted
from preft_cli.data.turn import Row

IGNORE = -100
"""The label of positions that are not learnt, by PyTorch's convention."""


@dataclass(frozen=True)
class Packed:
    """One sequence, without padding. Each tensor is `[T]`."""

    input_ids: Tensor
    position_ids: Tensor
    """Where the token stands in its row."""
    prompt_mask: Tensor
    """True where the adapter of a prefill-only method acts."""
    labels: Tensor
    """The token itself where it is to be learnt, in its own column: not shifted."""
    predicted_by: Tensor
    """The column whose logits predict it. The last one of a prompt may predict the beginnings of many completions."""
    seen_until: Tensor
    """The first column behind it whose token does not see it."""

    def __len__(self) -> int:
        return len(self.input_ids)


def pack(rows: Sequence[Row], *, share: bool = True) -> Packed:
    """One sequence of all `rows`; without `share` each has its prompt for itself."""
    rows, new = ordered(rows, share=share)
    length = sum(new)
    ids, positions, labels, predicted_by, seen_until = (torch.zeros(length, dtype=torch.long) for _ in range(5))
    prompt_mask = torch.zeros(length, dtype=torch.bool)
    labels.fill_(IGNORE)
    path = torch.zeros(0, dtype=torch.long)  # the columns of the prompt that is being continued, by position
    column = 0
    for row, count in zip(rows, new, strict=True):
        shared = len(row) - count
        end, middle = column + count, column + len(row.prompt_ids) - shared
        seen_until[path[shared:]] = column
        ids[column:end] = torch.tensor([*row.prompt_ids[shared:], *row.completion_ids])
        positions[column:end] = torch.arange(shared, len(row))
        prompt_mask[column : column + int(num_adapted(len(row.prompt_ids), shared, count))] = True
        path = torch.cat([path[:shared], torch.arange(column, middle)])
        labels[middle:end] = ids[middle:end]
        predicted_by[middle:end] = torch.cat([path[-1:], torch.arange(middle, end - 1)])
        seen_until[middle:end] = end
        column = end
    seen_until[path] = column
    return Packed(ids, positions, prompt_mask, labels, predicted_by, seen_until)


def ordered(rows: Iterable[Row], *, share: bool = True) -> tuple[list[Row], list[int]]:
    """The rows as they are laid down, and how many tokens each adds to those before it.

    In the order of `by_prompt`, which is that of a depth-first walk.
    """
    if not share:
        return (kept := list(rows)), list(map(len, kept))
    rows = sorted(rows, key=by_prompt)
    before = [[], *(row.prompt_ids for row in rows)]
    return rows, [len(row) - num_alike(last, row.prompt_ids) for last, row in zip(before, rows, strict=False)]


def by_prompt(row: Row) -> bytes:
    """Sorted by this, prompts that begin alike are side by side, a prompt before those that continue it.

    Bytes are compared far faster than lists, which matters where thousands of rows have the same system prompt.
    """
    return array("I", row.prompt_ids).tobytes()


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def attention_mask(seen_until_BT: Tensor) -> Tensor:
    """Who sees whom, `[B, 1, T, T]` (bool), a query a row: see `Packed.seen_until`."""
    columns_T = torch.arange(seen_until_BT.shape[1], device=seen_until_BT.device)
    before_TT = columns_T[:, None] >= columns_T
    return (before_TT & (columns_T[:, None] < seen_until_BT[:, None, :]))[:, None]
