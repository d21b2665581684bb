"""Run one arm's process, follow it, and leave nothing of it behind."""

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

from preft_cli.bench.results import WorkerResult
from preft_cli.bench.worker import Progress, WorkerSpec
from preft_cli.errors import UserError

COMMAND = (sys.executable, "-m", "preft_cli.bench.worker")

SILENCE_S = 3600.0
"""A process that ends no phase for this long is taken for stuck. Large models take many minutes to start."""

POLL_S = 0.1
STOP_S = 10.0
"""Seconds between asking a process group to stop and killing it."""

QUOTED_LINES = 12


def run_worker(
    spec: WorkerSpec,
    environment: dict[str, str | None],
    folder: Path,
    log: Path,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    silence_s: float = SILENCE_S,
    command: Sequence[str] = COMMAND,
) -> WorkerResult:
    """Run `spec` in a fresh process.

    Args:
        environment: set on top of this process' environment; None removes a variable.
        folder: scratch folder for the files that the two processes exchange.
        log: everything that the process and its engine print.
        on_progress: called for each phase that ended.

    Raises:
        UserError: if it fails or is stuck, with the log's last lines and path.
    """
    spec_path, result_path = folder / "spec.json", folder / "result.json"
    spec_path.write_text(spec.model_dump_json(indent=2))
    spec.progress.touch()
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches us alone, and we end the whole group, engine processes included.
        process = subprocess.Popen(
            [*command, str(spec_path), str(result_path)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=merged(environment),
            start_new_session=True,
        )
        try:
            code = follow(process, spec.progress, on_progress, silence_s)
        finally:
            stop(process)
    if code is None:
        raise UserError(f"bench arm {spec.arm}: no progress for {silence_s:.0f} s, stopped.\n{quote(log)}")
    if code != 0 or not result_path.exists():
        raise UserError(f"bench arm {spec.arm}: its process ended with {ending(code)}.\n{quote(log)}")
    return WorkerResult.model_validate_json(result_path.read_text())


def follow(
    process: subprocess.Popen[bytes], progress: Path, on_progress: Callable[[Progress], None], silence_s: float
) -> int | None:
    """Pass on the process' progress until it ends; its exit code, or None when it fell silent."""
    heard = time.monotonic()
    with progress.open() as lines:
        pending = ""
        while True:
            code = process.poll()
            pending += lines.read()
            *whole, pending = pending.split("\n")
            for line in whole:
                on_progress(Progress.model_validate_json(line))
                heard = time.monotonic()
            if code is not None:
                return code
            if time.monotonic() - heard > silence_s:
                return None
            time.sleep(POLL_S)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process' whole group, politely first: an engine that is killed leaves its shared memory behind."""
    if process.poll() is None:
        signal_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    while signal_group(process.pid, 0) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    signal_group(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin:
        process.stdin.close()


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
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    shown = lines[-QUOTED_LINES:]
    # vLLM's last lines say that the engine failed; the reason is the first exception logged as an error above them.
    first = next((line for line in lines if re.search(r"\bERROR\b.*\b[A-Z]\w*Error: ", line)), None)
    if first is not None and first not in shown:
        shown = [first, "…", *shown]
    return "\n".join([*(f"  | {line}" for line in shown), f"The whole log: {log}"])
