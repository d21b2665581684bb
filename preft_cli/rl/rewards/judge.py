"""Judges answers in a process of its own, with limits of time and memory.

What compares mathematics or scores puzzles evaluates what a model wrote: one answer in thousands is 9**9**9**9, or makes
sympy search for ever. An alarm ends Python code only, and in the main thread only (math-verify's own timeouts are such); a
process can be killed at any place, and the answer then counts as wrong. The process has no environment variables of the user's
and, on Linux, cannot write, start programs or reach the network (`judge_process.py`); it reads what the user can read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from preft_cli.errors import UserError
from preft_cli.rl.rewards.sandbox import bare_environment
from preft_cli.rl.rewards.unjudged import DIED, FAILED, TIMED_OUT, Unjudged, Verdict

START_S = 120.0
"""Imports of a cold disk."""
TIMEOUT_S = 3.0
"""Of one answer. Python code gets an exception then; what does not heed it is killed after twice the time."""

MOST_TOLD = 1 << 16
"""Bytes of what the process tells of one answer."""


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
        self._folder: TemporaryDirectory[str] | None = None
        self._sent = 0
        self._unjudged = Unjudged(judge)
        self._lock = threading.Lock()

    def scores(self, jobs: Sequence[Any]) -> list[float]:
        """One number for each; 0 for those that could not be judged, of which the user is warned.

        Raises:
            UserError: the process does not start, or judges none of many.
        """
        with self._lock:
            verdicts = [self._score(job) for job in jobs]
            self._unjudged.note(jobs, verdicts)
        return [verdict.score for verdict in verdicts]

    def stop(self) -> None:
        """End the process, if it was started."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._pipe = self._folder = None

    def _score(self, job: Any) -> Verdict:
        pipe = self._pipe or self._start()
        fate = DIED
        with suppress(OSError, EOFError, ValueError, TypeError):
            self._sent += 1
            pipe.send((self._sent, job))
            if not pipe.poll(2 * self.timeout_s + 1):
                fate = TIMED_OUT
            else:
                number, value, reason = json.loads(pipe.recv_bytes(MOST_TOLD))
                if number == self._sent:  # else an answer spoke for the process, and what follows would be off by one
                    if value is not None:
                        return Verdict(float(value))
                    return Verdict(0.0, FAILED if reason else TIMED_OUT, str(reason or ""))
        self.stop()
        return Verdict(0.0, fate)

    def _start(self) -> Connection:
        """The pipe to a process that has said that it is ready."""
        ours, theirs = Pipe()
        self._pipe = ours
        self._folder = TemporaryDirectory(prefix="preft-judge-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "preft_cli.rl.rewards.judge_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd=self._folder.name,
            env=_environment(self._folder.name),
            start_new_session=True,  # Ctrl-C is its parent's; it ends with the pipe
        )
        theirs.close()
        reason = "it took too long"
        with suppress(OSError, EOFError):
            ours.send((self.judge, self.settings, self.timeout_s))
            if ours.poll(START_S):
                reason = json.loads(ours.recv_bytes())
                if reason is None:
                    return ours
        self.stop()
        raise UserError(f"train.grpo.rewards: the process that judges answers ({self.judge}) does not start: {reason}")


def _environment(folder: str) -> dict[str, str]:
    """The same imports as here, and the caches of packages that would build them anew (matplotlib's fonts)."""
    kept = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR") if name in os.environ}
    paths = [str(Path(path).absolute()) for path in sys.path if path]
    return {**bare_environment(folder), **kept, "PYTHONPATH": os.pathsep.join(paths)}
