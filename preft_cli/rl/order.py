"""In which order problems are trained on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from torch.utils.data import Sampler


class ProblemOrder(Sampler[int]):
    """Shuffled anew in each epoch; what does not fill a step is left out, and comes in another epoch.

    Upstream's order goes on from that of the epoch before, which a resumed run has not seen; this one depends on the seed and the
    epoch alone.
    """

    def __init__(
        self, num_problems: int, problems_a_step: int, answers: int, passes: int, seed: int, epoch: Callable[[], int]
    ) -> None:
        """`answers` to each problem; each step's problems come `passes` times (gradient accumulation times iterations).

        `epoch` tells where the run is.
        """
        self._problems, self._step = num_problems, problems_a_step
        self._answers, self._passes = answers, passes
        self._seed, self._epoch = seed, epoch

    def __len__(self) -> int:
        return self._problems // self._step * self._step * self._answers * self._passes

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._problems))
        random.Random(f"{self._seed}/{self._epoch()}").shuffle(order)
        for start in range(0, len(order) - self._step + 1, self._step):
            step = [number for number in order[start : start + self._step] for _ in range(self._answers)]
            for _ in range(self._passes):
                yield from step
