"""Runs of pages: never two on one page, never more than there are, least recently used go first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_patch.pool.arena import Arena


def never(_: str) -> bool:
    return False


def always(_: str) -> bool:
    return True


def check(arena: Arena) -> None:
    """No two runs share a page, holes and runs are all there is, and neighbouring holes are one."""
    spans = sorted([(r.start, r.stop, 1) for r in arena.runs.values()] + [(a, b, 0) for a, b in arena._holes])
    end = 0
    for start, stop, _ in spans:
        assert start == end < stop
        end = stop
    assert end == arena.num_pages
    assert all(one[2] or other[2] for one, other in itertools.pairwise(spans))
    assert arena.used == sum(run.pages for run in arena.runs.values()) <= arena.num_pages


def test_the_least_recently_used_goes_first_and_only_what_is_in_the_way() -> None:
    arena = Arena(10)
    for key, pages in (("a", 2), ("b", 6), ("c", 2)):
        assert arena.place(key, pages, never)[1] == []
    arena.touch("a")
    assert arena.place("d", 1, always)[1] == ["b"]  # the oldest
    # c is older than a but not beside the hole that b left.
    run, evicted = arena.place("e", 6, always)
    assert (run is not None and run.start, evicted) == (3, ["c"])
    check(arena)


def test_nothing_is_evicted_in_vain() -> None:
    arena = Arena(4)
    arena.place("a", 2, never)
    arena.place("b", 2, never)
    assert arena.place("c", 3, lambda key: key == "a") == (None, [])
    assert list(arena.runs) == ["a", "b"]
    assert arena.place("d", 5, always) == (None, [])


def test_compacting_makes_one_hole_of_many() -> None:
    arena = Arena(12)
    for key in "abcdef":
        arena.place(key, 2, never)
    for key in "ace":
        arena.free(key)
    assert arena.place("big", 5, never) == (None, [])
    moves = arena.compact()
    assert [(m.key, m.source, m.target) for m in moves] == [("b", 2, 0), ("d", 6, 2), ("f", 10, 4)]
    assert arena.place("big", 6, never)[0] is not None
    check(arena)


def test_moves_in_order_lose_nothing() -> None:
    arena, memory = Arena(30), [""] * 30
    for index in range(10):
        arena.place(str(index), 1 + index % 5, never)
    for key, run in arena.runs.items():
        memory[run.start : run.stop] = [key] * run.pages
    for key in ("0", "3", "4", "8"):
        arena.free(key)
    for move in arena.compact():
        memory[move.target : move.target + move.pages] = memory[move.source : move.source + move.pages]
    for key, run in arena.runs.items():
        assert memory[run.start : run.stop] == [key] * run.pages


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.booleans()), max_size=60), st.integers(8, 40))
def test_any_history_keeps_the_books(steps: list[tuple[int, int, bool]], num_pages: int) -> None:
    arena = Arena(num_pages)
    for number, pages, evict in steps:
        key = str(number)
        if key in arena.runs:
            arena.free(key) if pages % 2 else arena.touch(key)
        else:
            free = num_pages - arena.used
            run, evicted = arena.place(key, pages, always if evict else never)
            assert evict or not evicted
            if evict and pages <= num_pages:
                assert run is not None
            if run is None and not evict and free >= pages:
                arena.compact()
                assert arena.place(key, pages, never)[0] is not None
        check(arena)


@pytest.mark.parametrize("pages", [1, 3])
def test_an_arena_without_pages_holds_nothing(pages: int) -> None:
    assert Arena(0).place("a", pages, always) == (None, [])
