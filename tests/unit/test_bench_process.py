"""One arm's process: what it reports, how its end is told, and that nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from preft_cli.bench.process import quote, run_worker
from preft_cli.bench.results import Repetition, WorkerResult
from preft_cli.bench.worker import Progress, WorkerSpec, judge
from preft_cli.bench.workload import Request
from preft_cli.errors import UserError

RESULT = WorkerResult(
    arm="base",
    requests_digest="d",
    start_seconds=1.0,
    engine={"dtype": "torch.float32"},
    patch=[],
    repetitions=[Repetition(seconds=2.0, requests=4, tokens_asked=8, tokens_produced=8, failures=0)],
    failed=[],
)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., WorkerResult]:
    """Run Python code as the worker; it finds the spec's path in argv[1], the result's in argv[2]."""
    (tmp_path / "good.json").write_text(RESULT.model_dump_json())
    spec = WorkerSpec(
        arm="base",
        engine_args={},
        requests=tmp_path / "requests.json",
        adapters=[],
        plugin=False,
        progress=tmp_path / "progress.jsonl",
    )

    def run(code: str, silence_s: float = 30, on_progress: Callable[[Progress], None] = lambda _: None) -> WorkerResult:
        header = "import os, sys, time, json; spec = json.load(open(sys.argv[1]))\n"
        return run_worker(
            spec,
            {"PREFT_DISABLE": "1", "HOME": None},
            tmp_path,
            tmp_path / "base.log",
            command=[sys.executable, "-c", header + code],
            silence_s=silence_s,
            on_progress=on_progress,
        )

    return run


GOOD = "import shutil; shutil.copy(os.path.dirname(sys.argv[1]) + '/good.json', sys.argv[2])\n"


def gone(pid: int, within_s: float = 5) -> bool:
    """Whether the process ends (or is a zombie that nobody waits for) in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_the_result_and_the_progress_arrive(run: Callable[..., WorkerResult]) -> None:
    heard: list[Progress] = []
    line = Progress(phase="start", seconds=1.5, note="n").model_dump_json()
    result = run(f"open(spec['progress'], 'a').write({line!r} + chr(10))\n{GOOD}", on_progress=heard.append)
    assert result == RESULT
    assert [(phase.phase, phase.note) for phase in heard] == [("start", "n")]


def test_the_environment_is_changed_and_cleared(run: Callable[..., WorkerResult]) -> None:
    run(f"assert os.environ['PREFT_DISABLE'] == '1' and 'HOME' not in os.environ\n{GOOD}")


def test_a_crash_quotes_the_cause_and_names_the_log(run: Callable[..., WorkerResult], tmp_path: Path) -> None:
    code = "print('WARNING ValueError: harmless'); print('ERROR core.py] KeyError: the cause')\n"
    code += "[print('noise', i) for i in range(40)]; sys.exit('engine failed')"
    with pytest.raises(UserError) as failed:
        run(code)
    message = str(failed.value)
    assert failed.value.exit_code == 1
    assert "exit code 1" in message
    assert "the cause" in message
    assert "engine failed" in message
    assert "harmless" not in message
    assert str(tmp_path / "base.log") in message


def test_no_result_is_a_failure(run: Callable[..., WorkerResult]) -> None:
    with pytest.raises(UserError, match="no result"):
        run("pass")


def test_a_kill_is_told_as_such(run: Callable[..., WorkerResult]) -> None:
    with pytest.raises(UserError, match="SIGKILL"):
        run("os.kill(os.getpid(), 9)")


def test_a_silent_process_is_stopped_with_its_children(run: Callable[..., WorkerResult], tmp_path: Path) -> None:
    child = "import subprocess; p = subprocess.Popen(['sleep', '600'])\n"
    code = (
        f"{child}open(os.path.dirname(sys.argv[1]) + '/pids', 'w').write(f'{{os.getpid()}} {{p.pid}}')\ntime.sleep(600)"
    )
    with pytest.raises(UserError, match="no progress"):
        run(code, silence_s=2)
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_ctrl_c_takes_the_whole_group_down(run: Callable[..., WorkerResult], tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "pids").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    code = "import subprocess; p = subprocess.Popen(['sleep', '600'])\n"
    code += "open(os.path.dirname(sys.argv[1]) + '/pids.tmp', 'w').write(f'{os.getpid()} {p.pid}')\n"
    code += (
        "os.rename(os.path.dirname(sys.argv[1]) + '/pids.tmp', os.path.dirname(sys.argv[1]) + '/pids')\ntime.sleep(600)"
    )
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run(code)
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_the_worker_dies_with_its_parent(tmp_path: Path) -> None:
    code = "from preft_cli.bench import worker; import threading, time\n"
    code += "threading.Thread(target=worker.die_with_parent, daemon=True).start(); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    try:
        time.sleep(0.5)
        assert process.poll() is None
        assert process.stdin
        process.stdin.close()
        assert process.wait(20) != 0
    finally:
        if process.poll() is None:
            process.kill()


def test_planted_failures_are_counted() -> None:
    requests = [Request(id=f"r{i}", prompt_token_ids=[i], output_len=4, adapter=0) for i in range(4)]
    reasons: list[str] = []
    done = judge(requests, [(4, "length"), (3, "length"), (4, "stop")], 2.0, reasons)
    assert (done.failures, done.tokens_asked, done.tokens_produced) == (3, 16, 11)
    assert [reason.split(":")[0] for reason in reasons] == ["r1", "r2", "r3"]
    assert done.requests_per_second == 0.5


def test_an_empty_log_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    assert str(tmp_path / "log") in quote(tmp_path / "log")
