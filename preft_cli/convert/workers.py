"""Many adapters at once: worker processes that are handed one adapter at a time.

A pool of the standard library breaks as a whole when one of its processes is killed (for memory, say) and cannot tell what
that one was at. Here each worker has a pipe of its own: its end names the adapter, and the others go on.
"""

from __future__ import annotations

import glob
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from preft_cli.convert.results import Action, ConvertedItem, FailedItem, PlannedItem, Target

if TYPE_CHECKING:
    from preft_cli.adapters.base import BaseFacts

Outcome = ConvertedItem | FailedItem

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
                    worker.give(waiting.popleft(), items)
    finally:
        _end(workers, items)


class _Worker:
    """One process and what it is at."""

    def __init__(self, base: BaseFacts, action: Action, to: Target) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would take over torch's threads in an unknown state
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, base, action, to), daemon=True)
        self.ready = False
        self.at: int | None = None
        main = threading.current_thread() is threading.main_thread()
        # Inherited: Ctrl-C is answered by this process alone, also while the new one is still importing.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        try:
            self.process.start()
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
        theirs.close()

    def give(self, at: int, items: Sequence[PlannedItem]) -> None:
        """Hand over the item at position `at`."""
        self.at = at
        with suppress(OSError):  # it has just died, and the end of its pipe tells so
            self.pipe.send(items[at])


def _hire(workers: list[_Worker], base: BaseFacts, action: Action, to: Target) -> None:
    """Start one more, unless the machine has no room for it: those that run do its share."""
    with suppress(OSError):
        workers.append(_Worker(base, action, to))


def _serve(pipe: Connection, base: BaseFacts, action: Action, to: Target) -> None:
    """A worker's life: say that it is ready, then one item in, one outcome out, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    import torch

    from preft_cli.convert.work import do_item

    torch.set_num_threads(1)  # the processes share the cores already
    try:
        pipe.send(None)
        while True:
            pipe.send(do_item(pipe.recv(), base, action, to))
    except (EOFError, OSError):
        return


def _leave(*_: object) -> None:
    # Unlike the default, this runs the handlers that remove half-written files.
    raise SystemExit(1)


def _died(worker: _Worker, item: PlannedItem) -> FailedItem:
    code = worker.process.exitcode or 0
    _remove_remains(item)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    hint = "; if the machine ran out of memory, try --jobs 1" if code == -signal.SIGKILL else ""
    return FailedItem.of(item.source, f"the process that worked on it {how}{hint}")


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
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
