"""`launch` with small scripts in place of the workers: one message whatever goes wrong, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.training import launch as launching
from preft_cli.training import plan, processes
from preft_cli.training.interrupt import InterruptedRunError
from preft_cli.training.launch import launch
from preft_cli.training.sweep.cell import run_cell
from tests.unit.sweeps import grid

# As `worker`, without what takes long: torch.
START = """
import json, os, sys, time, signal
from pathlib import Path
pipe = open(0, "rb", buffering=0)
job, rank, folder = json.loads(pipe.readline()), int(os.environ["RANK"]), Path(sys.argv[1])
def fail(message, user_error=True, interrupted=False):
    about = {"message": message, "exit_code": 2, "user_error": user_error, "interrupted": interrupted, "stopped": False}
    (folder / f"error-{rank}.json").write_text(json.dumps(about))
    sys.exit(1)
"""
TWO = PreftConfig.model_validate({"train": {"num_processes": 2}})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "GRACE_S", 0.5)


def start(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(launching, "WORKER", [sys.executable, "-c", START + script])
    launch(TWO, Path("/nowhere"), resume=True, overwrite=False)


def test_each_process_gets_its_place_and_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start(
        monkeypatch,
        f"""
environment = [os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")]
told = [environment, job["config"], job["root"], job["resume"], job["overwrite"], int(os.environ["MASTER_PORT"]) > 0]
Path({str(tmp_path)!r}, str(rank)).write_text(json.dumps(told))
""",
    )
    for rank in "01":
        expected = f'[["{rank}", "2", "127.0.0.1"], {{"train": {{"num_processes": 2}}}}, "/nowhere", true, false, true]'
        assert (tmp_path / rank).read_text() == expected, "settings that nobody set stay unset"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('fail("train.file: x does not exist")', r"^train\.file: x does not exist$"),
        ('time.sleep(60) if rank else fail("no")', "^no$"),
        ('time.sleep(0.5 * (1 - rank)); fail(f"ValueError: {rank}", False)', r"^process 1 of 2: ValueError: 1$"),
        (
            'print("bad luck", file=sys.stderr) if rank else time.sleep(60); sys.exit(rank * 3)',
            r"^process 1 of 2 ended with code 3\. bad luck",
        ),
        (
            "os.kill(os.getpid(), 9) if rank else time.sleep(60)",
            "^process 1 of 2 was ended by signal 9; perhaps memory",
        ),
    ],
)
def test_one_message_whatever_goes_wrong(monkeypatch: pytest.MonkeyPatch, script: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match=message):
        start(monkeypatch, script)
    assert time.monotonic() - started < 20, "nobody waits for one that is gone"


def test_ctrl_c_reaches_all_of_them_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They end in their own time, longer than that of one that failed."""
    script = f"""
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
Path({str(tmp_path)!r}, str(rank)).touch()
while not seen: time.sleep(0.01)
time.sleep(1)
fail(f"stopped, {{len(seen)}} signal")
"""

    def press() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(UserError, match=r"^stopped, 1 signal$"):
        start(monkeypatch, script)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(monkeypatch, 'fail("interrupted", False, True)')


# The real worker, whose run is stopped by Ctrl-C.
STOPPED = """
from preft_cli.errors import UserError
from preft_cli.training import run, worker
from preft_cli.training.interrupt import InterruptedRunError
def train(*arguments, **options):
    raise UserError("stopped at step 3") from InterruptedRunError()
run.train = train
raise SystemExit(worker.main())
"""


def test_ctrl_c_ends_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was stopped is no run that has failed, after which the next one begins."""
    monkeypatch.setattr(launching, "WORKER", [sys.executable, "-c", STOPPED])
    cell = grid("train.num_processes=2").cells[0]
    with pytest.raises(InterruptedRunError):
        run_cell(cell, tmp_path, Mock(), resume=False)


def test_nobody_is_left_where_one_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    group, original = [], launching._start

    def one_alone(*place: Any) -> Any:
        if group:
            raise BlockingIOError("Resource temporarily unavailable")
        group.append(original(*place))
        return group[0]

    monkeypatch.setattr(launching, "_start", one_alone)
    with pytest.raises(BlockingIOError):
        start(monkeypatch, "time.sleep(60)")
    try:
        assert group[0].poll() is not None
    finally:
        group[0].kill()


def test_started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun says how many there are."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert processes.world_size() == 1, "of some cluster, no launcher"
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    assert (processes.world_size(), processes.rank(), processes.is_main()) == (2, 1, False)
    assert plan.as_launched(PreftConfig()).train.num_processes == 2
    assert plan.as_launched(TWO) is TWO
    with pytest.raises(UserError, match="3, but 2 processes were started"):
        plan.as_launched(PreftConfig.model_validate({"train": {"num_processes": 3}}))
