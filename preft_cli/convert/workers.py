"""Many adapters at once: worker processes that are handed one adapter at a time.

See `preft_cli.worker_process`.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from preft_cli.convert.results import Action, ConvertedItem, FailedItem, PlannedItem, Target
from preft_cli.worker_process import WorkerProcess, ignore_ctrl_c, serve_jobs

if TYPE_CHECKING:
    from preft_cli.adapters.base import BaseFacts

Outcome = ConvertedItem | FailedItem

_Worker = WorkerProcess[int]
"""Of the positions of items."""

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
PATIENCE_S = 5.0
"""How long an interrupted worker may take to tidy up behind it."""


def in_processes(
    items: Sequence[PlannedItem], base: BaseFacts, action: Action, to: Target, jobs: int
) -> Generator[tuple[int, Outcome]]:
    """Convert or check `items` in at most `jobs` processes; yields the position of each and what became of it, as they end.

    Ends early, with items left over, only if no worker process can be started. Closing it ends the workers; what they
    were writing is removed.
    """
    waiting = deque(range(len(items)))
    workers: list[_Worker] = []
    try:
        for _ in range(min(jobs, len(items))):
            _hire(workers, base, action, to)
        while workers and (waiting or any(worker.at is not None for worker in workers)):
            pipes = {worker.pipe: worker for worker in workers}
            for pipe in wait(list(pipes)):
                worker = pipes[pipe]  # type: ignore[index]  # wait() gives back what it was given
                at = worker.at
                try:
                    outcome = worker.pipe.recv()
                except (EOFError, OSError):
                    workers.remove(worker)
                    worker.process.join()
                    if at is not None:
                        yield at, _died(worker, items[at])
                    # One that ended before it was ready would only end again.
                    if worker.ready and waiting:
                        _hire(workers, base, action, to)
                    continue
                worker.ready, worker.at = True, None
                if at is not None:
                    yield at, outcome
                if waiting:
                    worker.give(at := waiting.popleft(), items[at])
    finally:
        _end(workers, items)


def _hire(workers: list[_Worker], base: BaseFacts, action: Action, to: Target) -> None:
    """Start one more, unless the machine has no room for it: those that run do its share."""
    with suppress(OSError):
        workers.append(_Worker(_serve, base, action, to))


def _serve(pipe: Connection, base: BaseFacts, action: Action, to: Target) -> None:
    """A worker's life: say that it is ready, then one item in, one outcome out, until the pipe is closed."""
    ignore_ctrl_c()
    import torch

    from preft_cli.convert.work import do_item

    torch.set_num_threads(1)  # the processes share the cores already
    serve_jobs(pipe, lambda item: do_item(item, base, action, to))


def _died(worker: _Worker, item: PlannedItem) -> FailedItem:
    _remove_remains(item)
    hint = "; if the machine ran out of memory, try --jobs 1" if worker.was_killed else ""
    return FailedItem.of(item.source, f"the process that worked on it {worker.how_it_ended()}{hint}")


def _remove_remains(item: PlannedItem) -> None:
    """Remove what a killed process was writing (see `atomic_write` and `atomic_folder`)."""
    path = Path(item.path)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _end(workers: Sequence[_Worker], items: Sequence[PlannedItem]) -> None:
    for worker in workers:
        if worker.at is None and worker.ready:
            worker.pipe.close()  # idle: it leaves by itself
        else:
            worker.process.terminate()
    for worker in workers:
        worker.process.join(PATIENCE_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        if worker.at is not None:
            _remove_remains(items[worker.at])


def cores() -> int:
    """How many this process may use: those it is bound to, or the share that its container has of them."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_MAX.read_text().split()
        return min(bound, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no share is set
        return bound
