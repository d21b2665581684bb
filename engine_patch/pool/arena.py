"""Runs of pages in one buffer of fixed size: given out, taken back, least recently used first. No torch here.

One run an adapter, so that bringing it in is one copy, and kernels find its weights by one offset. Holes between runs of
different sizes are closed by moving runs (see `compact`), so a run always fits where as many pages are free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Run:
    """Pages `start .. start + pages - 1` belong to one adapter."""

    start: int
    pages: int

    @property
    def stop(self) -> int:
        """One past the last page."""
        return self.start + self.pages


Hole = tuple[int, int]
"""(start, stop) of free pages."""


@dataclass(frozen=True)
class Move:
    """The run of `key` went from page `source` to page `target`, which lies before it."""

    key: str
    source: int
    target: int
    pages: int


class Arena:
    """Who has which pages. It never holds more than `num_pages`."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.used = 0
        """Pages in runs."""
        self.runs: OrderedDict[str, Run] = OrderedDict()
        """By content digest, least recently used first."""
        self._holes: list[Hole] = [(0, num_pages)] if num_pages else []

    def touch(self, key: str) -> None:
        """Make `key` the most recently used."""
        self.runs.move_to_end(key)

    def free(self, key: str) -> None:
        """Take the pages of `key` back."""
        run = self.runs.pop(key)
        self.used -= run.pages
        _add(self._holes, (run.start, run.stop))

    def place(self, key: str, pages: int, evictable: Callable[[str], bool]) -> tuple[Run | None, list[str]]:
        """Give `key` a run, and make room for it by evicting what is `evictable`, least recently used first.

        Returns the run, or None if none can be had even so; and the keys that were evicted: only those in its way.
        """
        holes = list(self._holes)
        start = _first(holes, pages)
        gone = []
        if start is None:
            for other, run in self.runs.items():
                if evictable(other):
                    gone.append(other)
                    _add(holes, (run.start, run.stop))
                    if (start := _first(holes, pages)) is not None:
                        break
        if start is None:
            return None, []
        evicted = [k for k in gone if self.runs[k].start < start + pages and start < self.runs[k].stop]
        for other in evicted:
            self.free(other)
        self._take(start, start + pages)
        self.used += pages
        self.runs[key] = Run(start, pages)
        return self.runs[key], evicted

    def compact(self) -> list[Move]:
        """Close all holes: the moves to make, in order. None lands on a run that has yet to be moved, but on its own."""
        moves, end = [], 0
        for key, run in sorted(self.runs.items(), key=lambda item: item[1].start):
            if run.start != end:
                moves.append(Move(key, run.start, end, run.pages))
                run.start = end
            end = run.stop
        self._holes = [(end, self.num_pages)] if end < self.num_pages else []
        return moves

    def _take(self, start: int, stop: int) -> None:
        """Cut `start .. stop` out of the hole that it lies in."""
        index = next(i for i, hole in enumerate(self._holes) if hole[0] <= start and stop <= hole[1])
        left, right = (self._holes[index][0], start), (stop, self._holes[index][1])
        self._holes[index : index + 1] = [hole for hole in (left, right) if hole[0] < hole[1]]


def _first(holes: list[Hole], pages: int) -> int | None:
    """The first page of the first hole of `pages` pages."""
    return next((start for start, stop in holes if stop - start >= pages), None)


def _add(holes: list[Hole], hole: Hole) -> None:
    """Put `hole` among the sorted `holes`, as one with those that it touches."""
    index = bisect_left(holes, hole)
    start, stop = hole
    if index < len(holes) and holes[index][0] == stop:
        stop = holes.pop(index)[1]
    if index > 0 and holes[index - 1][1] == start:
        index -= 1
        start = holes.pop(index)[0]
    holes.insert(index, (start, stop))
