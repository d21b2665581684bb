"""Several cells at once: worker processes that import once and take one cell at a time.

See `preft_cli.worker_process`.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from preft_cli.training.interrupt import InterruptedRunError, InterruptRequest
from preft_cli.training.sweep.cell import Preparer, failed, run_cell
from preft_cli.training.sweep.folders import folder_of
from preft_cli.training.sweep.grid import Cell
from preft_cli.training.sweep.result import CellResult
from preft_cli.worker_process import WorkerProcess, ignore_ctrl_c, serve_jobs

POLL_S = 0.5
"""How soon Ctrl-C is noticed."""


def run_in_processes(
    cells: Sequence[Cell],
    root: Path,
    environments: Sequence[Mapping[str, str]],
    stop: InterruptRequest,
    *,
    resume: bool,
) -> Generator[CellResult]:
    """Run `cells` in one process for each of `environments`; yields what became of each, as they end.

    When `stop` is requested, cells that are running save a checkpoint, and the generator ends with cells left over. It ends
    so too if no process can be started. Each cell's output goes to `train.log` in its folder.
    """
    waiting = deque(cells)
    workers = [_Worker(root, environment, resume) for environment in environments[: len(cells)]]
    asked = False
    try:
        while workers and (waiting or any(worker.at for worker in workers)):
            if stop.requested and not asked:
                asked = True
                waiting.clear()
                for worker in workers:
                    worker.process.terminate()
            pipes = {worker.pipe: worker for worker in workers}
            for pipe in wait(list(pipes), timeout=POLL_S):
                worker = pipes[pipe]  # type: ignore[index]  # wait() gives back what it was given
                at = worker.at
                try:
                    result = worker.pipe.recv()
                except (EOFError, OSError):
                    workers.remove(worker)
                    worker.process.join()
                    if at and not stop.requested:
                        yield failed(at, _how_it_died(worker))
                    # One that ended before it was ready would only end again.
                    if worker.ready and waiting:
                        workers.append(_Worker(root, worker.environment, resume))
                    continue
                worker.ready, worker.at = True, None
                if at and result is not None:
                    yield result
                if waiting:
                    worker.give(cell := waiting.popleft(), cell)
    finally:
        for worker in workers:
            worker.end()


class _Worker(WorkerProcess[Cell]):
    """One process and the cell that it is at."""

    def __init__(self, root: Path, environment: Mapping[str, str], resume: bool) -> None:
        super().__init__(_serve, root, dict(environment), resume)
        self.environment = environment

    def end(self) -> None:
        """Let an idle one leave by itself; whatever is still at work is not needed any more."""
        self.pipe.close()
        if self.at is not None or not self.ready:
            self.process.kill()
        self.process.join()


def _serve(pipe: Connection, root: Path, environment: dict[str, str], resume: bool) -> None:
    """A worker's life: say that it is ready, then one cell in, one result out, until the pipe is closed."""
    os.environ.update(environment)  # before torch is imported: it reads them once
    os.setpgrp()  # or a terminal's Ctrl-C would come here too, beside the parent's request to stop
    ignore_ctrl_c()
    import torch

    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    prepare = Preparer(root)
    serve_jobs(pipe, lambda cell: _run_logged(cell, root, prepare, resume))


def _run_logged(cell: Cell, root: Path, prepare: Preparer, resume: bool) -> CellResult | None:
    """The cell's result, with all output of this process in its log; None if it was asked to stop."""
    folder = folder_of(cell, root)
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.log.open("a", encoding="utf-8") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        return run_cell(cell, root, prepare, resume=resume)
    except InterruptedRunError:
        return None
    except ModuleNotFoundError as missing:
        return failed(cell, f"a package is missing: {missing.name}")


def _how_it_died(worker: _Worker) -> str:
    hint = (
        "if the machine ran out of memory, lower --jobs"
        if worker.was_killed
        else "train.log in its folder may tell why"
    )
    return f"its process {worker.how_it_ended()}; {hint}"
