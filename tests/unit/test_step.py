"""Runs of adapted tokens, and the blocks that they are cut into, against loops over tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine_patch.kernels.step import Place, Runs, Segment, cut, find_segments
from engine_patch.kernels.tiles import block_rows, most_blocks


def place(kind: int, page: int) -> Place:
    return Place(kind, page, linear=True, streams=False)


def runs(*pairs: tuple[int, int]) -> Runs:
    ids, counts = zip(*pairs, strict=True) if pairs else ((), ())
    return Runs(np.array(ids, dtype=np.int64), np.array(counts, dtype=np.int64))


def test_runs_come_as_they_are_or_token_by_token() -> None:
    made = runs((7, 2), (0, 1))
    assert Runs.of(tuple(made)) == made
    ids, counts = Runs.of((7, 7, 0))
    assert (ids.tolist(), counts.tolist()) == ([7, 7, 0], [1, 1, 1])
    assert [len(part) for part in Runs.of(())] == [0, 0]


def test_segments_are_the_adapted_runs() -> None:
    places = {7: place(2, 5), 9: place(0, 1)}
    found = find_segments(runs((7, 2), (0, 2), (9, 0), (9, 1), (0, 0), (7, 1)), places)
    assert found == [Segment(0, 2, places[7]), Segment(4, 5, places[9]), Segment(5, 6, places[7])]


@pytest.mark.parametrize("seed", range(50))
def test_blocks_hold_every_token_once_with_its_own_adapter(seed: int) -> None:
    rng = random.Random(seed)
    places = {id_: place(rng.randrange(3), rng.randrange(100)) for id_ in rng.sample(range(1, 10**6), 6)}
    pairs = [(rng.choice([0, *places]), rng.choice([0, 1, 2, 17, 100])) for _ in range(rng.randrange(40))]
    pairs += [(10**7, 0)] * rng.randrange(2)  # a request that decodes has an adapter, which has no place in the step
    rng.shuffle(pairs)
    of_tokens = [id_ for id_, count in pairs for _ in range(count)]
    rows = rng.choice([1, 16, 64])
    found = cut(runs(*pairs), places, rows)
    assert sorted(found.tokens.tolist()) == list(range(len(of_tokens)))
    seen = 0
    for index, (first, left, kind, page) in enumerate(found.blocks.tolist()):
        assert 0 < left <= rows
        assert first == seen  # one after another, without holes
        seen += left
        (id_,) = {of_tokens[token] for token in found.tokens[first : first + left]}
        assert (kind, page) == (places[id_][:2] if id_ else (-1, 0))
        assert (index < found.adapted) == (id_ != 0)
    assert seen == len(of_tokens)


@pytest.mark.parametrize("seed", range(50))
def test_no_step_has_more_blocks_than_a_graph_of_its_size_launches(seed: int) -> None:
    """A graph's step may be padded past the size from which tiles are taller."""
    rng = random.Random(seed)
    num_tokens = rng.choice([1, 16, 500, 512, 513, 1000])
    used, most = rng.randint(max(1, num_tokens - 16), num_tokens), rng.choice([1, 4, 40, 600])
    cuts = sorted(rng.sample(range(1, used), min(used - 1, rng.randrange(600))))
    sizes = np.diff([0, *cuts, used])
    ids = [rng.randint(0, most) for _ in sizes]
    places = {id_: place(0, id_) for id_ in range(1, most + 1)}
    for rank, invariant in ((8, False), (64, False), (8, True)):
        found = cut(runs(*zip(ids, sizes.tolist(), strict=True)), places, block_rows(used, rank, invariant))
        assert len(found.blocks) <= most_blocks(num_tokens, most, rank, invariant)
        assert block_rows(used, rank, invariant) <= block_rows(num_tokens, rank, invariant)


@pytest.mark.parametrize("adapters", [1, 4])
def test_the_bound_is_reached(adapters: int) -> None:
    """Every adapter, and the base, with one token more than fills a block."""
    pairs = [(id_, 17) for id_ in range(adapters + 1)]
    places = {id_: place(0, id_) for id_ in range(1, adapters + 1)}
    found = cut(runs(*pairs), places, block_rows(17 * len(pairs), 8))
    assert len(found.blocks) == 2 * len(pairs) == most_blocks(17 * len(pairs), adapters, 8)
