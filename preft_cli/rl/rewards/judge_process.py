"""The process behind `Judge`: one job in, one number out, until the pipe is closed.

Sympy's parser and some environments evaluate what a model wrote as Python. Once all is imported, the process gives up what
`sandboxed_linux` takes from programs: it writes nowhere but in its empty folder, starts nothing and reaches no network.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from preft_cli.rl.rewards.sandboxed import confine_resources
from preft_cli.rl.rewards.sandboxed_linux import confine

MEMORY = 4 << 30
"""Of addresses; an answer that needs more is wrong."""
FILE_SIZE = 10 << 20


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
            _tell(pipe, f"{type(error).__name__}: {error}")
            return
        confine_resources(MEMORY, FILE_SIZE)
        if sys.platform == "linux":
            confine(Path.cwd())
        _tell(pipe, None)
        while True:
            number, job = pipe.recv()
            _tell(pipe, [number, *_in_time(score, job, timeout_s)])


def _tell(pipe: Connection, value: Any) -> None:
    """As JSON: to unpickle is to run what the other side likes, and an answer may have got hold of this side."""
    pipe.send_bytes(json.dumps(value).encode())


def _in_time(score: Callable[[Any], float], job: Any, timeout_s: float) -> tuple[float | None, str | None]:
    """The score; or None and what went wrong, None if it took too long."""
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            return float(score(job)), None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TooLong:
        return None, None
    except Exception as error:  # whatever an answer makes a library stumble over
        return None, f"{type(error).__name__}: {error}"[:300]


def _too_long(*_: object) -> None:
    raise TooLong


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
