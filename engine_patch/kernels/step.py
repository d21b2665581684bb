"""Which tokens of a step use which adapter, as its kernels need it. Plain arrays: nothing here touches a device.

The adapted tokens of a step are a few runs: the first tokens of some requests. They are known on the host before the step,
so that nothing has to be sorted, counted or waited for on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """The tokens of a step, in order: `counts[i]` of them have the adapter `ids[i]`, 0 for none. Both `[num_runs]`."""

    ids: Ints
    counts: Ints

    @classmethod
    def of(cls, mapping: tuple[Any, ...]) -> Runs:
        """From the token map that vLLM hands on: our runners put runs into it, its warm-up an id for every token."""
        if mapping and isinstance(mapping[0], np.ndarray):
            return cls(*mapping)
        return cls(np.array(mapping, dtype=np.int64), np.ones(len(mapping), dtype=np.int64))


NO_RUNS = Runs(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
"""Of a step without adapted tokens, which nobody asks for its other tokens."""


class Place(NamedTuple):
    """Where an adapter is on the device."""

    kind: int
    """Its row of the table of weights, which all adapters of a kind share."""
    page: int
    """Its first page; the table's offsets begin there."""
    linear: bool
    """Whether it adapts linear layers."""
    streams: bool
    """Whether it adapts residual streams."""


class Segment(NamedTuple):
    """Rows `start .. stop - 1` of the step use the adapter at `place`."""

    start: int
    stop: int
    place: Place


def find_segments(runs: Runs, places: Mapping[int, Place]) -> list[Segment]:
    """The adapted rows of a step, in order.

    Args:
        runs: of the step.
        places: of all of its adapters, by id.
    """
    stops = np.cumsum(runs.counts)
    return [
        Segment(stop - count, stop, places[id_])
        for id_, count, stop in zip(runs.ids.tolist(), runs.counts.tolist(), stops.tolist(), strict=True)
        if id_ > 0 and count > 0
    ]


class Blocks(NamedTuple):
    """A step cut into blocks, each of a few tokens with one adapter; a program of a kernel computes one block.

    Adapters come one after another, and last the blocks of tokens without an adapter.
    """

    tokens: npt.NDArray[np.int32]
    """`[num_tokens]`: the rows of x and y, block after block."""
    blocks: npt.NDArray[np.int32]
    """`[num_blocks, 4]`: first place in `tokens`, number of tokens, and the place (kind, -1 for none; page)."""
    adapted: int
    """How many of the blocks have an adapter; they come first."""


def cut(runs: Runs, places: Mapping[int, Place], rows: int) -> Blocks:
    """Cut a step into blocks of at most `rows` tokens.

    Args:
        runs: of the step.
        places: of all of its adapters, by id.
    """
    starts = np.cumsum(runs.counts) - runs.counts
    last = np.iinfo(np.int64).max
    keys = np.where(runs.ids > 0, runs.ids, last)
    order = np.argsort(keys, kind="stable")
    order = order[runs.counts[order] > 0]  # a request that decodes has an adapter and no adapted token
    keys, counts, starts = keys[order], runs.counts[order], starts[order]
    ends = np.cumsum(counts)
    tokens = np.repeat(starts - (ends - counts), counts) + np.arange(int(counts.sum()))

    heads = np.flatnonzero(np.diff(keys, prepend=-1))  # the first run of each adapter
    sizes = np.add.reduceat(counts, heads) if len(heads) else heads
    num_blocks = -(-sizes // rows)
    group = np.repeat(np.arange(len(heads)), num_blocks)
    before = (np.arange(len(group)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)) * rows
    where = np.array([places[id_][:2] if id_ != last else (-1, 0) for id_ in keys[heads].tolist()]).reshape(-1, 2)
    firsts = (np.cumsum(sizes) - sizes)[group] + before
    blocks = np.column_stack([firsts, np.minimum(sizes[group] - before, rows), where[group]])
    adapted = int(num_blocks[keys[heads] != last].sum())
    return Blocks(tokens.astype(np.int32), np.ascontiguousarray(blocks, dtype=np.int32), adapted)
