"""`train.num_processes`: starts the processes of a run on this machine, and ends all of them together.

They find each other as under torchrun, by the same variables, so that a run can also be started by torchrun itself or by
`accelerate launch`. torchrun's own agent is not used: it ends the others within 30 s of a Ctrl-C, where the run's are to save a
checkpoint first, and it reports an error as one block of text for each process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.training.interrupt import SIGNALS, InterruptedRunError

WORKER = [sys.executable, "-m", "preft_cli.training.worker"]
GRACE_S = 10.0
"""When one process has ended with an error, the others have this long to end with theirs."""
POLL_S = 0.2


def launch(config: PreftConfig, root: Path, *, resume: bool, overwrite: bool) -> None:
    """Run the training of `config` in `train.num_processes` processes, to its end.

    Raises:
        UserError: whatever stops one of them, as one message; its cause is an InterruptedRunError after Ctrl-C.
        KeyboardInterrupt: Ctrl-C before the first step, or for the second time.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there, though not exported for checkers

    # The store listens on a free port before any process looks for it; choosing a number for them could meet another run.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = config.model_dump(mode="json", exclude_unset=True)
    job = {"config": settings, "root": str(root), "resume": resume, "overwrite": overwrite}
    number = config.train.num_processes
    with tempfile.TemporaryDirectory(prefix="preft-train-") as name:
        folder = Path(name)
        group: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(number):
                group.append(_start(rank, number, store.port, folder))
            with _forwarded(group):
                for process in group:
                    _give(process, job)
                failed = _wait(group)
        finally:
            _end(group)
        if failed:
            raise _error(folder, failed, number)


def _start(rank: int, number: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    threads = max(1, len(os.sched_getaffinity(0)) // number)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with (folder / f"log-{rank}").open("wb") as log:
        return subprocess.Popen(
            [*WORKER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=None if rank == 0 else log,
            stderr=None if rank == 0 else log,
            env=environment,
            # Ctrl-C in a terminal reaches this process alone, which passes it on: once to each.
            start_new_session=True,
        )


def _give(process: subprocess.Popen[bytes], job: dict[str, Any]) -> None:
    """The pipe stays open: a worker whose pipe ends knows that this process is gone, and stops."""
    assert process.stdin
    with suppress(BrokenPipeError):  # it has ended already; `_wait` sees that
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()


@contextmanager
def _forwarded(group: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Inside of this block Ctrl-C and SIGTERM go to the processes, which save a checkpoint and end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, frame: Any) -> None:
        for process in group:
            process.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(group: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Until all have ended, or one has failed and the others had time to; exit codes of those that failed, by rank."""
    failed: dict[int, int] = {}
    deadline = None
    while any(process.poll() is None for process in group):
        failed |= {rank: process.returncode for rank, process in enumerate(group) if process.poll()}
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_S
        if deadline and time.monotonic() > deadline:
            return failed
        time.sleep(POLL_S)
    return failed | {rank: process.returncode for rank, process in enumerate(group) if process.returncode}


def _end(group: list[subprocess.Popen[bytes]]) -> None:
    """Those that are left wait for one that is gone: there is nothing that they could still save."""
    for process in group:
        if process.poll() is None:
            process.kill()
    for process in group:
        process.wait()
        if process.stdin:
            with suppress(BrokenPipeError):
                process.stdin.close()


def _error(folder: Path, failed: dict[int, int], number: int) -> BaseException:
    """What the first process to fail has to say: the others only lost their connection to it."""
    files = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    told = {int(path.stem.removeprefix("error-")): json.loads(path.read_text()) for path in files}
    for error in told.values():
        if error["interrupted"]:
            return KeyboardInterrupt()
        if error["user_error"]:
            problem = UserError(error["message"], error["exit_code"])
            problem.__cause__ = InterruptedRunError() if error["stopped"] else None
            return problem
    silent = [rank for rank in failed if rank not in told]
    if told and not silent:
        rank, error = next(iter(told.items()))
        return UserError(f"process {rank} of {number}: {error['message']}")
    rank, code = silent[0], failed[silent[0]]
    log = (folder / f"log-{rank}").read_text(errors="replace").strip()[-2000:]
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    memory = "; perhaps memory ran out" if code == -signal.SIGKILL else ""
    return UserError(f"process {rank} of {number} {how}{memory}. {log}".rstrip())
