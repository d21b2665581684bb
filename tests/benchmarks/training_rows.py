"""Rows of random ids for `bench_training`: prompts and completions of many lengths."""

from __future__ import annotations

import random

from preft_cli.data import Row

COMPLETIONS = 4
TURNS = (2, 5)


def lone(num_rows: int, vocabulary: int, limit: int) -> list[Row]:
    """Every prompt is another one."""
    draw = Draw(vocabulary)
    return [Row(draw.ids(limit // 4, limit // 2), draw.ids(limit // 8, limit // 4)) for _ in range(num_rows)]


def repeated(num_rows: int, vocabulary: int, limit: int) -> list[Row]:
    """Each prompt has four completions."""
    draw = Draw(vocabulary)
    prompts = [draw.ids(limit // 4, limit // 2) for _ in range(-(-num_rows // COMPLETIONS))]
    rows = [Row(list(prompt), draw.ids(limit // 8, limit // 4)) for prompt in prompts for _ in range(COMPLETIONS)]
    return rows[:num_rows]


def conversations(num_rows: int, vocabulary: int, limit: int) -> list[Row]:
    """Two to five turns each; the prompt of a turn is all that was said before it."""
    draw, rows = Draw(vocabulary), []
    part = limit // (2 * TURNS[1])  # the longest conversation fills the limit
    while len(rows) < num_rows:
        said: list[int] = []
        for _ in range(draw.randint(*TURNS)):
            said += draw.ids(part // 2, part)
            answer = draw.ids(part // 2, part)
            rows.append(Row(list(said), answer))
            said += answer
    return rows[:num_rows]


CASES = {"lone prompts": lone, "four completions a prompt": repeated, "conversations": conversations}


class Draw(random.Random):
    """Always the same."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(0)
        self._vocabulary = vocabulary

    def ids(self, low: int, high: int) -> list[int]:
        """Of some length from `low` to `high`."""
        return self.choices(range(100, self._vocabulary), k=self.randint(max(low, 1), max(high, 1)))
