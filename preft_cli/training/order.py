"""In which order rows are trained on."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from torch.utils.data import Sampler

from preft_cli.data.turn import Row
from preft_cli.training.arrange import groups_of

LOOK_AHEAD = 64
"""As many groups are looked through for one that fills a batch."""


class SharedPromptOrder(Sampler[int]):
    """Shuffled, but rows that share a prompt follow each other, if possible in one batch.

    Every batch has its full number of rows: where no group fits, one is split. So there are as many steps as without. The
    order depends on the seed and the epoch alone, in all processes and after a resume.
    """

    def __init__(self, rows: Sequence[Row], batch_size: int, seed: int) -> None:
        self._groups = groups_of(rows)
        self._num_rows = len(rows)
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer; each epoch has another order."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[int]:
        shuffled = random.Random(f"{self._seed}/{self._epoch}").sample(self._groups, len(self._groups))
        waiting, room = deque(shuffled), self._batch_size
        while waiting:
            ahead = enumerate(islice(waiting, LOOK_AHEAD))
            chosen = next((index for index, group in ahead if len(group) <= room), 0)
            group = waiting[chosen]
            del waiting[chosen]
            yield from group
            # What is too long for this batch goes on in the next ones.
            room = (room - len(group)) % self._batch_size or self._batch_size
