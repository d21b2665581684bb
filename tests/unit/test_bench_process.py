"""The process of an engine: what it reports, how its end is told, and that nothing of it stays behind."""

from __future__ import annotations

import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preft_cli.bench import worker
from preft_cli.bench.engine import Answer, Answered, EngineSpec
from preft_cli.bench.process import EngineProcess, quote
from preft_cli.bench.results import Counters, Repetition, Started
from preft_cli.bench.worker import Event, WorkerSpec, judge
from preft_cli.bench.workload import Request, Workload
from preft_cli.errors import UserError

COUNTERS = Counters(
    preemptions=0, prompt_tokens=4, prefix_cache_queries=0, prefix_cache_hits=0, adapter_loads={"device": 1, "host": 1}
)
REPETITION = Repetition(
    number=2, seconds=2.0, requests=4, tokens_asked=8, tokens_produced=8, failures=0, counters=COUNTERS
)
STARTED = Event(
    phase="started",
    started=Started(requests_digest="d", start_seconds=1.0, engine={"dtype": "torch.float32"}, patch=[]),
)
Start = Callable[..., EngineProcess]


def spec(folder: Path) -> EngineSpec:
    return EngineSpec(arm="base", mode="offline", engine_args={}, adapters=[], plugin=False, scratch=folder)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start Python code as the worker; `say(line)` appends to its events."""
    started: list[EngineProcess] = []

    def start(code: str, silence_s: float = 30) -> EngineProcess:
        header = (
            "import os, sys, time, json; spec = json.load(open(sys.argv[1])); here = os.path.dirname(sys.argv[1])\n"
            "def say(line): open(spec['events'], 'a').write(line + chr(10))\n"
        )
        process = EngineProcess(
            "base",
            spec(tmp_path),
            {"PREFT_DISABLE": "1", "HOME": None},
            tmp_path / "requests.json",
            tmp_path / "base.log",
            command=[sys.executable, "-c", header + code],
            silence_s=silence_s,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.stop(idle=False)


SAY_STARTED = f"say({STARTED.model_dump_json()!r})\n"


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


def test_it_starts_measures_and_stops(start: Start) -> None:
    event = Event(phase="measured", repetition=REPETITION, failed=["r1: 0 of 2 tokens"])
    code = f"assert sys.stdin.readline() == 'measure 2' + chr(10)\nsay({event.model_dump_json()!r})\n"
    process = start(f"{SAY_STARTED}{code}assert sys.stdin.readline() == 'stop' + chr(10)\nopen(here + '/left', 'w')")
    assert process.wait("started") == STARTED
    assert process.measure(2) == event
    process.stop()
    assert (process.log.parent / "left").exists()


def test_a_line_that_is_half_written_is_waited_for(start: Start) -> None:
    line = STARTED.model_dump_json()
    code = f"f = open(spec['events'], 'a'); f.write({line[:20]!r}); f.flush(); time.sleep(0.3)\n"
    code += f"f.write({line[20:]!r} + chr(10)); f.close()"
    assert start(code).wait("started") == STARTED


def test_what_it_said_before_it_ended_is_heard(start: Start) -> None:
    process = start(SAY_STARTED)
    time.sleep(0.5)
    assert process.wait("started") == STARTED
    with pytest.raises(UserError, match="no result"):
        process.wait("warm")


def test_the_environment_is_changed_and_cleared(start: Start) -> None:
    code = f"assert os.environ['PREFT_DISABLE'] == '1' and 'HOME' not in os.environ\n{SAY_STARTED}"
    assert start(code).wait("started") == STARTED


def test_a_crash_quotes_the_cause_and_names_the_log(start: Start, tmp_path: Path) -> None:
    code = "print('WARNING ValueError: harmless'); print('ERROR core.py] KeyError: the cause')\n"
    code += "[print('noise', i) for i in range(40)]; sys.exit('engine failed')"
    with pytest.raises(UserError) as failed:
        start(code).wait("started")
    message = str(failed.value)
    assert failed.value.exit_code == 1
    assert "exit code 1" in message
    assert "the cause" in message
    assert "engine failed" in message
    assert "harmless" not in message
    assert str(tmp_path / "base.log") in message


def test_warnings_are_not_quoted_as_if_they_were_the_cause(start: Start) -> None:
    with pytest.raises(UserError) as failed:
        start("print('WARNING ValueError: harmless'); sys.exit('the cause')").wait("started")
    assert "harmless" not in str(failed.value)
    assert "the cause" in str(failed.value)


def test_the_death_of_another_ends_the_waiting(start: Start) -> None:
    one, other = start("time.sleep(600)"), start("sys.exit(7)")
    with pytest.raises(UserError, match="exit code 7"):
        one.wait("started", other.require_alive)


def test_a_kill_is_told_as_such(start: Start) -> None:
    with pytest.raises(UserError, match="SIGKILL"):
        start("os.kill(os.getpid(), 9)").wait("started")


def test_a_silent_process_is_told_of_and_stopped_with_its_children(start: Start, tmp_path: Path) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '600'])\n"
    code += "open(here + '/pids', 'w').write(f'{os.getpid()} {p.pid}')\ntime.sleep(600)"
    process = start(code, silence_s=2)
    with pytest.raises(UserError, match="no progress"):
        process.wait("started")
    process.stop(idle=False)
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_one_that_does_not_listen_is_killed(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preft_cli.bench.process.STOP_S", 0.5)
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(here + '/pids', 'w').write(str(os.getpid()))\n"
    process = start(f"{code}{SAY_STARTED}time.sleep(600)")
    process.wait("started")
    process.stop()
    assert gone(int((tmp_path / "pids").read_text()))


def test_the_worker_dies_with_its_parent(tmp_path: Path) -> None:
    code = "from preft_cli.bench import worker; import queue, threading, time\n"
    code += "threading.Thread(target=worker.listen, args=(queue.Queue(),), daemon=True).start(); time.sleep(600)"
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


def requests(count: int) -> list[Request]:
    return [Request(id=f"r{i}", prompt_token_ids=[i], output_len=4, adapter=0) for i in range(count)]


class FakeEngine:
    """Answers everything but what it is told to leave short."""

    settings: dict[str, Any] = {"dtype": "torch.float32"}  # noqa: RUF012 - the protocol's field
    patch: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, short: str = "") -> None:
        self.short, self.stopped = short, False

    def answer(self, requests: list[Request], *, warm_up: bool = False) -> Answered:
        assert warm_up == (len(requests) == 2)
        answers = [Answer(one.output_len - (one.id == self.short), "length") for one in requests]
        return Answered(2.0, answers, COUNTERS, None)

    def stop(self) -> None:
        self.stopped = True


def test_the_worker_does_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(seed=0, warmup=requests(2), repetitions=[requests(3), requests(4)])
    (tmp_path / "requests.json").write_text(workload.model_dump_json())
    engine = FakeEngine(short="r3")
    monkeypatch.setattr(worker, "start_engine", lambda _: engine)
    commands: queue.Queue[str] = queue.Queue()
    for command in ("measure 1", "measure 0", "stop"):
        commands.put(command)
    worker.run(WorkerSpec(engine=spec(tmp_path), requests=tmp_path / "requests.json", events=tmp_path / "e"), commands)
    events = [Event.model_validate_json(line) for line in (tmp_path / "e").read_text().splitlines()]
    assert [event.phase for event in events] == ["started", "warm", "measured", "measured"]
    assert events[0].started is not None
    assert events[0].started.requests_digest == workload.digest()
    done = [event.repetition for event in events[1:] if event.repetition]
    assert [(one.number, one.requests, one.failures) for one in done] == [(-1, 2, 0), (1, 4, 1), (0, 3, 0)]
    assert events[2].failed == ["r3: 3 of 4 tokens, finish reason length"]
    assert engine.stopped


def test_planted_failures_are_counted() -> None:
    answered = Answered(2.0, [Answer(4, "length"), Answer(3, "length"), Answer(4, "stop")], COUNTERS, None)
    done, reasons = judge(requests(4), answered, 0)
    assert (done.failures, done.tokens_asked, done.tokens_produced) == (3, 16, 11)
    assert [reason.split(":")[0] for reason in reasons] == ["r1", "r2", "r3"]
    assert done.requests_per_second == 0.5


def test_an_empty_log_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    assert str(tmp_path / "log") in quote(tmp_path / "log")
