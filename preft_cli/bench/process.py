"""The process of one engine: start it, have it measure, and leave nothing of it behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from preft_cli.bench.engine import EngineSpec
from preft_cli.bench.worker import Event, WorkerSpec
from preft_cli.errors import UserError

COMMAND = (sys.executable, "-m", "preft_cli.bench.worker")

SILENCE_S = 3600.0
"""A process that ends no phase for this long is taken for stuck. Large models take many minutes to start."""

POLL_S = 0.05
STOP_S = 10.0
"""Seconds that a process group has to end when it is told to, and again when it is sent a signal, before it is killed."""

QUOTED_LINES = 12


class EngineProcess:
    """A fresh process with the engine of one arm."""

    def __init__(
        self,
        name: str,
        spec: EngineSpec,
        environment: dict[str, str | None],
        requests: Path,
        log: Path,
        *,
        silence_s: float = SILENCE_S,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Start it; `wait` tells when it is ready.

        Args:
            name: of the engine, for messages.
            environment: set on top of this process' environment; None removes a variable.
            requests: a `Workload` as JSON.
            log: everything that the process and its engine print.
        """
        self.name, self.log, self._silence_s = name, log, silence_s
        spec_path, events = spec.scratch / "spec.json", spec.scratch / "events.jsonl"
        events.touch()
        spec_path.write_text(WorkerSpec(engine=spec, requests=requests, events=events).model_dump_json(indent=2))
        self._events, self._pending = events.open(), ""
        with log.open("wb") as output:
            # A session of its own: Ctrl-C reaches us alone, and we end the whole group, engine processes included.
            self._process = subprocess.Popen(
                [*command, str(spec_path)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=merged(environment),
                start_new_session=True,
            )

    def measure(self, number: int, watch: Callable[[], None] = lambda: None) -> Event:
        """Have it answer the requests of repetition `number`.

        Args:
            watch: called again and again meanwhile; what it raises ends the waiting.

        Raises:
            UserError: as `wait` does.
        """
        self._tell(f"measure {number}")
        return self.wait("measured", watch)

    def wait(self, phase: Literal["started", "warm", "measured"], watch: Callable[[], None] = lambda: None) -> Event:
        """Wait for the end of a phase.

        Raises:
            UserError: the process ended or fell silent; with the log's last lines and path.
        """
        heard = time.monotonic()
        while True:
            code = self._process.poll()  # before reading: what it said last is not missed
            if event := self._read():
                assert event.phase == phase, f"{self.name}: {event.phase} instead of {phase}"
                return event
            self.require_alive(code)
            watch()
            if time.monotonic() - heard > self._silence_s:
                raise UserError(
                    f"bench arm {self.name}: no progress for {self._silence_s:.0f} s, stopped.\n{quote(self.log)}"
                )
            time.sleep(POLL_S)

    def require_alive(self, code: int | None = None) -> None:
        """Raise if the process has ended.

        Args:
            code: its exit code, where that was asked for already.

        Raises:
            UserError: with the log's last lines and path.
        """
        if (code := self._process.poll() if code is None else code) is not None:
            raise UserError(f"bench arm {self.name}: its process ended with {ending(code)}.\n{quote(self.log)}")

    def stop(self, *, idle: bool = True) -> None:
        """End the process' whole group, politely first: an engine that is killed leaves its shared memory behind.

        Args:
            idle: whether it waits for a command, and can be told to leave; else it is sent a signal at once.
        """
        if idle:
            self._tell("stop")
            self._leave(STOP_S)
        signal_group(self._process.pid, signal.SIGTERM)
        self._leave(STOP_S)
        signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._events.close()
        if self._process.stdin:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _leave(self, within_s: float) -> None:
        """Give the whole group time to end."""
        deadline = time.monotonic() + within_s
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        while signal_group(self._process.pid, 0) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _tell(self, command: str) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it has ended: waiting for its answer says so
            self._process.stdin.write(f"{command}\n".encode())
            self._process.stdin.flush()

    def _read(self) -> Event | None:
        self._pending += self._events.readline()
        if not self._pending.endswith("\n"):
            return None
        line, self._pending = self._pending, ""
        return Event.model_validate_json(line)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False when nobody is left in it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS: EPERM when only zombies are left
        return False
    return True


def merged(changes: dict[str, str | None]) -> dict[str, str]:
    """This process' environment with `changes`; None removes a variable."""
    return {key: value for key, value in {**os.environ, **changes}.items() if value is not None}


def ending(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}" if code else "no result"
    name = signal.Signals(-code).name
    return f"signal {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def quote(log: Path) -> str:
    """The first error in the log, its last lines, and where it lies."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    everything = [line.rstrip() for line in text.splitlines() if line.strip()]
    # A warning with a traceback in it would read like the cause.
    lines = [line for line in everything if not re.search(r"\bWARNING\b", line)] or everything
    shown = lines[-QUOTED_LINES:]
    # vLLM's last lines say that the engine failed; the reason is the first exception logged as an error above them.
    first = next((line for line in lines if re.search(r"\bERROR\b.*\b[A-Z]\w*Error: ", line)), None)
    if first is not None and first not in shown:
        shown = [first, "…", *shown]
    return "\n".join([*(f"  | {line}" for line in shown), f"The whole log: {log}"])
