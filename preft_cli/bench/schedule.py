"""Which engines are alive side by side, and when each is measured."""

from __future__ import annotations

from pydantic import BaseModel as Record
from pydantic import ConfigDict

from preft_cli.bench.arms import BASE


class Block(Record):
    """A stretch of the benchmark in which the same engines are alive and take turns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engines: list[str]
    """Names of arms, in turn."""
    repetitions: list[int]
    """Sets of requests."""
    again: bool
    """Whether each does the first set once more at the end."""


def make_blocks(needs: dict[str, int], room: int, max_engines: int | None, repeats: int) -> list[Block]:
    """Who is alive together, and for which repetitions.

    The base engine takes turns with as many others as memory holds, then with the next ones. Where it cannot share the memory
    with each of them, every engine is alone, and started anew for every repetition: base, x, y, base, x, y.

    Args:
        needs: bytes by engine; the base arm is the first.
        room: bytes that all engines alive at once may take.
        max_engines: alive at once at most; None for no other bound than memory.
        repeats: sets of requests.
    """
    others = [name for name in needs if name != BASE]
    limit = max_engines or len(needs)
    if others and (limit == 1 or any(needs[BASE] + needs[name] > room for name in others)):
        return [
            Block(engines=[name], repetitions=[number], again=number == 0)
            for number in range(repeats)
            for name in needs
        ]
    groups: list[list[str]] = [[BASE]]
    for name in others:
        fitting = (g for g in groups if len(g) < limit and sum(needs[one] for one in [*g, name]) <= room)
        group = next(fitting, None)
        if group is None:
            groups.append(group := [BASE])
        group.append(name)
    return [Block(engines=group, repetitions=list(range(repeats)), again=True) for group in groups]


def turn_notes(blocks: list[Block]) -> list[str]:
    """Who took turns with whom."""
    groups = list(dict.fromkeys(tuple(block.engines) for block in blocks if len(block.engines) > 1))
    if groups:
        return [f"alive side by side, taking turns: {', '.join(group)}" for group in groups]
    return ["each engine alone, started anew for every repetition"]
