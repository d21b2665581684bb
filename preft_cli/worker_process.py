"""A process that is handed one job at a time, over a pipe of its own.

A pool of the standard library breaks as a whole when one of its processes is killed (for memory, say) and cannot tell what
that one was at. Here the end of its pipe names the job, and the others go on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

Job = TypeVar("Job")


class WorkerProcess(Generic[Job]):
    """One process, and the job that it is at."""

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        """`serve(pipe, *arguments)` is its life, to be lived by `serve_jobs`.

        Raises:
            OSError: the machine has no room for one more process.
        """
        context = get_context("spawn")  # a fork would take over torch's threads and CUDA in an unknown state
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self.ready = False
        """It has said that it is: one that ends before would only end again."""
        self.at: Job | None = None
        main = threading.current_thread() is threading.main_thread()
        # Inherited: Ctrl-C is answered by this process alone, also while the new one is still importing.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        try:
            self.process.start()
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
        theirs.close()

    def give(self, at: Job, message: Any) -> None:
        """Hand over the job `at`, which `message` tells it."""
        self.at = at
        with suppress(OSError):  # it has just died, and the end of its pipe tells so
            self.pipe.send(message)

    def how_it_ended(self) -> str:
        """`was killed by SIGKILL`, or `ended with exit code 7`; it is no more."""
        code = self.process.exitcode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    @property
    def was_killed(self) -> bool:
        """By SIGKILL, as the system does when memory runs out."""
        return self.process.exitcode == -signal.SIGKILL


def ignore_ctrl_c() -> None:
    """In a worker: Ctrl-C is its parent's, and SIGTERM runs the handlers that remove half-written files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)


def serve_jobs(pipe: Connection, do: Callable[[Any], Any]) -> None:
    """In a worker: say that it is ready, then one job in, one outcome out, until the pipe is closed."""
    with suppress(EOFError, OSError):
        pipe.send(None)
        while True:
            pipe.send(do(pipe.recv()))


def _leave(*_: object) -> None:
    raise SystemExit(1)
