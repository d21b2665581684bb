"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds by part, each with all that it has queued on the GPU."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time in this block for `name`."""
        started = now()
        try:
            yield
        finally:
            self.add(name, now() - started)

    def add(self, name: str, seconds: float) -> None:
        """Count so much for `name`."""
        self._seconds[name] += seconds

    def so_far(self) -> float:
        """All that was counted since the last `take`."""
        return sum(self._seconds.values())

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


def now() -> float:
    """Seconds, with nothing left to do on the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
