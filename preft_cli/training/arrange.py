"""Which rows lie in one sequence."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

from preft_cli.data.turn import Row
from preft_cli.training.packed import by_prompt, num_alike, ordered

PAIR_SLOWNESS = 4.0
"""Operations of masked attention take about that much longer than those of large matrix products."""


def arrange(rows: Sequence[Row], pair_cost: float) -> list[list[Row]]:
    """The rows of one step in as many sequences as make the least work.

    Each row by itself repeats what prompts have in common and pads short rows; few long sequences compute attention between
    rows that do not see each other, since a masked pair costs as much as any. Sequences are padded to the longest one.

    Args:
        rows: of one step.
        pair_cost: of one query and one key in one sequence, where all other work of one token is 1.
    """
    alone = [[row] for row in rows]

    def cost(sequences: Sequence[Sequence[Row]], longest: int) -> float:
        return len(sequences) * longest * (1 + pair_cost * longest)

    best, lowest = alone, cost(alone, max(map(len, rows)))
    in_order, new = ordered(rows)
    for number in range(len(rows) - 1, 0, -1):
        capacity = max(-(-sum(new) // number), max(map(len, rows)))
        sequences, longest = _fill(in_order, new, capacity)
        if (found := cost(sequences, longest)) < lowest:
            best, lowest = sequences, found
    return best


def pair_cost(hf_config: Any) -> float:
    """For `arrange`. A token takes about `24 hidden^2` operations in a layer and a pair `4 hidden`, and those run slower."""
    return PAIR_SLOWNESS / (6 * int(hf_config.get_text_config().hidden_size))


def _fill(rows: Sequence[Row], new: Sequence[int], capacity: int) -> tuple[list[list[Row]], int]:
    """Rows in their order (`ordered`) into sequences of at most `capacity` tokens; also the length of the longest."""
    sequences: list[list[Row]] = []
    length = longest = 0
    for row, count in zip(rows, new, strict=True):
        if sequences and length + count <= capacity:
            sequences[-1].append(row)
            length += count
        else:
            sequences.append([row])
            length = len(row)
        longest = max(longest, length)
    return sequences, longest


def groups_of(rows: Sequence[Row]) -> list[list[int]]:
    """Numbers of rows whose prompts are the same or continue each other, such as the turns of one conversation; else alone."""
    prompts = list(map(by_prompt, rows))
    groups: list[list[int]] = []
    for number in sorted(range(len(rows)), key=prompts.__getitem__):
        if groups and prompts[number].startswith(prompts[groups[-1][-1]]):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def pack_all(rows: Sequence[Row], max_length: int, *, share: bool, seed: int) -> list[list[Row]]:
    """All rows in sequences of at most `max_length` tokens, few of them: best-fit decreasing.

    With `share` rows that share a prompt stay together as far as they fit, and what all prompts begin with (a system prompt)
    takes room once. Equal `seed`s give equal sequences.
    """
    common = _common(rows) if share else 0
    room_in_all = max_length - common
    groups = groups_of(rows) if share else [[number] for number in range(len(rows))]
    units = [
        (sum(ordered(part, share=share)[1]) - common, part)
        for group in groups
        for part in _fill(*ordered([rows[number] for number in group], share=share), max_length)[0]
    ]
    random.Random(seed).shuffle(units)
    units.sort(key=lambda unit: unit[0], reverse=True)
    sequences: list[list[Row]] = []
    by_room: dict[int, list[list[Row]]] = {}
    rooms: list[int] = []  # the keys of by_room, in order
    for size, part in units:
        at = bisect_left(rooms, size)
        if at == len(rooms):
            sequences.append(sequence := [])
            room = room_in_all
        else:
            room = rooms[at]
            sequence = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        sequence += part
        left = room - size
        if left not in by_room:
            insort(rooms, left)
        by_room.setdefault(left, []).append(sequence)
    return sequences


def _common(rows: Sequence[Row]) -> int:
    """How many ids all prompts begin with: the first and the last one in order tell."""
    prompts = [row.prompt_ids for row in rows]
    return num_alike(min(prompts), max(prompts))
