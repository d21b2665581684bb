"""Judges answers in a process of its own, with limits of time and memory.

What compares mathematics or scores puzzles evaluates what a model wrote: one answer in thousands is 9**9**9**9, or makes
sympy search for ever. An alarm ends Python code only, and in the main thread only (math-verify's own timeouts are such); a
process can be killed at any place, and the answer then counts as wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from preft_cli.errors import UserError

START_S = 120.0
"""Imports of a cold disk."""
TIMEOUT_S = 3.0
"""Of one answer. Python code gets an exception then; what does not heed it is killed after twice the time."""


class Judge:
    """Scores jobs in order; started by the first one, and again after an answer that it did not survive."""

    def __init__(self, judge: str, settings: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """
        Args:
            judge: `module:function`; the function is called with `settings` and returns what scores one job.
        """
        self.judge, self.settings, self.timeout_s = judge, settings or {}, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lock = threading.Lock()

    def scores(self, jobs: Sequence[Any]) -> list[float]:
        """One number for each; 0 for those that took too long or too much memory.

        Raises:
            UserError: the process does not start.
        """
        with self._lock:
            return [self._score(job) for job in jobs]

    def stop(self) -> None:
        """End the process, if it was started."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _score(self, job: Any) -> float:
        pipe = self._pipe or self._start()
        with suppress(OSError, EOFError):
            pipe.send(job)
            if pipe.poll(2 * self.timeout_s + 1):
                return float(pipe.recv())
        self.stop()
        return 0.0

    def _start(self) -> Connection:
        """The pipe to a process that has said that it is ready."""
        ours, theirs = Pipe()
        self._pipe = ours
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "preft_cli.rl.rewards.judge_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is its parent's; it ends with the pipe
        )
        theirs.close()
        reason = "it took too long"
        with suppress(OSError, EOFError):
            ours.send((self.judge, self.settings, self.timeout_s))
            if ours.poll(START_S):
                reason = ours.recv()
                if reason is None:
                    return ours
        self.stop()
        raise UserError(f"train.grpo.rewards: the process that judges answers ({self.judge}) does not start: {reason}")
