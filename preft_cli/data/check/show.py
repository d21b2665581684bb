"""One row, token by token: where the adapter acts, and what is learnt."""

from __future__ import annotations

from typing import Any

from engine_patch.rule import is_prefill_only, num_adapted
from preft_cli.data.check.result import ShownRow, Token
from preft_cli.data.turn import Row


def adapted_positions(method: str, num_prompt_tokens: int, length: int) -> list[bool]:
    """Whether an adapter of `method` acts on each of `length` positions of a request."""
    adapted = num_adapted(num_prompt_tokens, 0, length) if is_prefill_only(method) else length
    return [position < adapted for position in range(length)]


def show_row(row: Row, method: str, tokenizer: Any) -> ShownRow:
    """`row` for an adapter of `method`."""
    ids = row.prompt_ids + row.completion_ids
    mask = adapted_positions(method, len(row.prompt_ids), len(ids))
    return ShownRow(
        where=row.where,
        tokens=[
            Token(id=id_, text=tokenizer.decode([id_]), adapted=adapted, learnt=position >= len(row.prompt_ids))
            for position, (id_, adapted) in enumerate(zip(ids, mask, strict=True))
        ],
    )
