"""In which order rows are trained on."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import Any

from torch.utils.data import Dataset, Sampler

from preft_cli.data.turn import Row
from preft_cli.training.arrange import groups_of

LOOK_AHEAD = 64
"""As many groups are looked through for one that fills a batch."""


class Order(Sampler[int]):
    """Shuffled, but rows of one group follow each other, if possible in one batch.

    Every batch has its full number of rows: where no group fits, the shortest is split. So there are as many steps as
    without. The order depends on the seed and the epoch alone, in all processes and after a resume.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Sequence[int]]],
        batch_size: int,
        seed: int,
        epoch: Callable[[], int] = lambda: 0,
        num_processes: int = 1,
    ) -> None:
        """`groups`: see `shared_groups`; `batch_size`: of one process.

        `epoch` tells where the run is. It is asked, since what others set does not arrive: after a resume Accelerate puts
        more loaders and samplers around this one than its `set_epoch` and that of the Trainer look through.
        """
        self._groups = groups
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = epoch
        self._num_rows = sum(len(rows) for group in groups for rows in group)
        # All processes take part in each step, with full batches, or Accelerate would start again from the first rows.
        self._num_blank = -self._num_rows % (batch_size * num_processes) if num_processes > 1 else 0

    def __len__(self) -> int:
        return self._num_rows + self._num_blank

    def __iter__(self) -> Iterator[int]:
        yield from self._rows(random.Random(f"{self._seed}/{self._epoch()}"))
        yield from [self._num_rows] * self._num_blank

    def _rows(self, draw: random.Random) -> Iterator[int]:
        waiting, room = deque(self._pieces(draw)), self._batch_size
        while waiting:
            sizes = [len(piece) for piece in islice(waiting, LOOK_AHEAD)]
            # If all are too long: the shortest one, so that whole batches of one group stay whole.
            chosen = next((index for index, size in enumerate(sizes) if size <= room), sizes.index(min(sizes)))
            piece = waiting[chosen]
            del waiting[chosen]
            yield from piece
            # What is left of it goes on in the next batch.
            room = (room - len(piece)) % self._batch_size or self._batch_size

    def _pieces(self, draw: random.Random) -> list[list[int]]:
        """The groups in another order each time, cut into batches, at other rows each time."""
        pieces = []
        for group in self._groups:
            rows = list(chain.from_iterable(draw.sample(alike, len(alike)) for alike in group))
            start = draw.randrange(len(rows))
            rows = rows[start:] + rows[:start]
            pieces += [rows[at : at + self._batch_size] for at in range(0, len(rows), self._batch_size)]
        draw.shuffle(pieces)
        return pieces


def shared_groups(rows: Sequence[Row]) -> list[list[list[int]]]:
    """`groups_of(rows)`, in each of them the rows of one prompt together, in the order in which prompts continue each other."""
    return [[list(alike) for _, alike in groupby(group, lambda n: rows[n].prompt_ids)] for group in groups_of(rows)]


class WithBlank(Dataset[Any]):
    """The rows (or sequences) and, behind the last one, None: what a process gets when there is no row left for it."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return None if index == len(self.rows) else self.rows[index]
