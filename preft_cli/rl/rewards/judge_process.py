"""The process behind `Judge`: one job in, one number out, until the pipe is closed."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

MEMORY = 4 << 30
"""Of addresses; an answer that needs more is wrong."""


class TooLong(BaseException):
    """No `Exception`: libraries catch those."""


def main(pipe: Connection) -> None:
    """Say None when ready, or why not, then serve."""
    with suppress(EOFError, OSError):
        name, settings, timeout_s = pipe.recv()
        signal.signal(signal.SIGALRM, _too_long)
        module, _, function = name.partition(":")
        try:
            score = getattr(import_module(module), function)(**settings)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            return
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most), most))
        pipe.send(None)
        while True:
            pipe.send(_in_time(score, pipe.recv(), timeout_s))


def _in_time(score: Callable[[Any], float], job: Any, timeout_s: float) -> float:
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            return float(score(job))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (Exception, TooLong):  # whatever an answer makes a library stumble over: it is not a right one
        return 0.0


def _too_long(*_: object) -> None:
    raise TooLong


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
