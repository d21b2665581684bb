"""Runs a program that a model wrote, and counts the tests that it passes.

Each program gets a process and an empty folder of its own, limits of time, memory, file sizes and open files, no
environment variables and, on Linux, no network, no other processes or threads, and no writing outside of its folder
(`sandboxed.py`). It can read what the user can read, and tests run in its own process. So this keeps mistakes and clumsy cheats
away from the machine and from the reward, but some ways to cheat remain: an object that says it equals everything
(`__eq__`), built-in functions that the tests call and the program replaced, or a search through the frames and objects of the
interpreter. Tests can compare types as well; look at what is rewarded. It is no security boundary either: where code may be
hostile, train in a container.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

CHILD = Path(__file__).with_name("sandboxed.py")
PATIENCE = 4
"""A right program does not turn wrong where others keep the cores busy; one that sleeps has an end too."""
MOST_OUTPUT = 1 << 20
"""Bytes that are read of what should be a few lines."""


class Limits(NamedTuple):
    """Of one program."""

    timeout_s: float
    """Of computing, rounded up to whole seconds; by the clock it is `PATIENCE` times that."""
    memory: int
    """Bytes of addresses."""
    stop_at_failure: bool = True
    """Do not run the tests behind one that failed."""
    file_size: int = 10 << 20


class Program(NamedTuple):
    """What is run, in this order."""

    code: str
    setup: str
    """Of the tests."""
    tests: list[str]


def run_tests(program: Program, limits: Limits) -> int:
    """How many of the tests pass. Those after the time limit do not; nothing of the program is left running."""
    # What a test passed is told on a pipe of its own by a word that is drawn for this run: a program that prints what a
    # passed test would print, or leaves early with exit code 0, has passed nothing.
    word = secrets.token_hex(16)
    told, tell = os.pipe()
    job = json.dumps({"word": word, "tell": tell, "limits": limits._asdict(), **program._asdict()})
    with TemporaryDirectory(prefix="preft-code-", ignore_cleanup_errors=True) as folder:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(CHILD)],
                cwd=folder,
                env=bare_environment(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[tell],
                start_new_session=True,
            )
        finally:
            os.close(tell)
        deadline = time.monotonic() + PATIENCE * limits.timeout_s
        try:
            _give(process, job)
            output = _read(told, deadline)
        finally:
            os.close(told)
            _end(process)
    lines = set(output.decode(errors="replace").split("\n"))
    return sum(f"{word} {index}" in lines for index in range(len(program.tests)))


def bare_environment(folder: str) -> dict[str, str]:
    """Nothing of the user's, such as tokens; one thread for libraries that would start many."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    loader = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    return {"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "LANG": "C.UTF-8", **threads, **loader}


def _give(process: subprocess.Popen[bytes], job: str) -> None:
    if process.stdin is not None:
        with suppress(OSError), process.stdin as stdin:
            stdin.write(job.encode())


def _read(told: int, deadline: float) -> bytes:
    """All that is told until the program ends or its time is over."""
    poll = select.poll()
    poll.register(told, select.POLLIN)
    output = b""
    while len(output) < MOST_OUTPUT and (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            chunk = os.read(told, 65536)
            if not chunk:
                break
            output += chunk
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
    process.kill()
    process.wait()
