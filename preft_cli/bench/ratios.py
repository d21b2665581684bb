"""Ratios of arms, from repetitions that lie beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from preft_cli.bench.arms import BASE
from preft_cli.bench.results import Repetition, Spread


def ratios(arms: Mapping[str, Sequence[Repetition]]) -> dict[str, Spread]:
    """Throughput of every arm but the base over every other.

    Each ratio is of two repetitions that answered the same requests. Within one block they are seconds apart. Arms of different
    blocks are compared by way of the base arm, which took turns with both, so that what changed in between cancels out.
    """
    found = {}
    for first in arms:
        for second in arms:
            if first not in (second, BASE) and (values := quotients(first, second, arms)):
                found[f"{first}/{second}"] = Spread.of(values)
    return found


def quotients(first: str, second: str, arms: Mapping[str, Sequence[Repetition]]) -> list[float]:
    """One value for each repetition that both have; none where an arm answered nothing."""
    below = {one.number: one for one in arms[second]}
    if second == BASE:  # it took part in every block
        below = {one.number: beside for one in arms[first] if (beside := _beside(one, arms[BASE]))} or below
    values = []
    for one in arms[first]:
        other = below.get(one.number)
        if other and one.requests_per_second and other.requests_per_second:
            drift = 1.0
            if one.block != other.block:
                here, there = _beside(one, arms[BASE]), _beside(other, arms[BASE])
                if here and there and here.requests_per_second:
                    drift = there.requests_per_second / here.requests_per_second
            values.append(one.requests_per_second / other.requests_per_second * drift)
    return values


def _beside(repetition: Repetition, others: Sequence[Repetition]) -> Repetition | None:
    """That of `others` which answered the same requests in the same block."""
    return next((o for o in others if (o.block, o.number) == (repetition.block, repetition.number)), None)


def same_seed(repetitions: Sequence[Repetition], again: Sequence[Repetition]) -> float | None:
    """Speed of the same requests the second time over the first; the median of the blocks that did it."""
    values = [
        once_more.requests_per_second / first.requests_per_second
        for once_more in again
        if (first := _beside(once_more, repetitions)) and first.requests_per_second
    ]
    return statistics.median(values) if values else None
