"""The reward `code`: what a program may do, and what passes. Reading files of the user is not prevented."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from preft_cli.convert import workers
from preft_cli.rl.problem import Problem
from preft_cli.rl.rewards import code
from preft_cli.rl.rewards.code import CodeArgs, CodeReward

SQUARE = {"tests": ["assert f(2) == 4", "assert f(3) == 9"]}
RIGHT = "def f(x): return x * x\n"
CONFINED = pytest.mark.skipif(sys.platform != "linux", reason="needs seccomp and Landlock")


def run(*programs: str, record: dict[str, Any] = SQUARE, **args: Any) -> list[float | None]:
    reward = CodeReward(CodeArgs(timeout_s=args.pop("timeout_s", 20), memory_mb=256, **args))
    problems = [Problem("x", record, f"train.jsonl:{row}") for row, _ in enumerate(programs, start=1)]
    return reward(problems, [f"Here it is:\n```python\n{program}```" for program in programs])


def test_right_and_wrong_programs() -> None:
    programs = {
        RIGHT: 1.0,
        "def f(x): return 4\n": 0.0,
        "def f(x) return": 0.0,
        "def g(x): return x * x\n": 0.0,
        "print('passed')\nprint('f(2) == 4')\n": 0.0,
        "def f(x):\n    print('0', '1', 'all tests passed')\n    return 0\n": 0.0,
        "import sys\nsys.exit(0)\n": 0.0,
        RIGHT + "import sys\nsys.exit(0)\n": 0.0,
        RIGHT + "import os\nos._exit(0)\n": 0.0,
        "def f(x): raise SystemExit(0)\n": 0.0,
        "def f(x): return f(x)\n": 0.0,
        "import ctypes\nctypes.string_at(0)\n": 0.0,
        RIGHT + "import os\nos.closerange(3, 256)\n": 0.0,
        "import sys\nsys.modules['__main__'].passes = lambda *a: True\nf = None\n": 0.0,
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None\nf = None\n": 0.0,
        RIGHT + "x = input()\n": 0.0,
        RIGHT + "\nif __name__ == '__main__':\n    input()\n": 1.0,
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass A:\n    x: int\n\n"
        "def f(x): return A(x).x ** 2\n": 1.0,
        "import os\nassert os.listdir() == []\nopen('a', 'w').write('x')\nos.remove('a')\n" + RIGHT: 1.0,
        "open('/dev/null', 'w').write('x')\n" + RIGHT: 1.0,
    }
    given = run(*programs)
    assert dict(zip(programs, given, strict=True)) == programs


def test_an_endless_loop_ends_in_time_and_leaves_nothing_running() -> None:
    begin = time.monotonic()
    loops = ["while True: pass\n", "import time\ntime.sleep(100)\n", "import signal\nsignal.pause()\n"]
    assert run(*loops, timeout_s=0.5) == [0.0] * 3
    assert time.monotonic() - begin < 15
    if Path("/proc").is_dir():
        running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/stat") if _mine(path)]
        assert running == []


def _mine(stat: Path) -> bool:
    """A child of this process that runs a program."""
    try:
        return b"sandboxed.py" in (stat.parent / "cmdline").read_bytes() and f" {os.getpid()} " in stat.read_text()
    except OSError:
        return False


@CONFINED
def test_a_program_starts_no_others_and_reaches_no_network_and_no_process() -> None:
    refused = "try:\n    {}\nexcept (OSError, RuntimeError):\n    f = lambda x: x * x\n"
    for call in (
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import threading; threading.Thread(target=print).start()",
        "import socket; socket.socket()",
        "import os; os.kill(os.getppid(), 0)",
    ):
        assert run(refused.format(call)) == [1.0], call
    assert run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n", timeout_s=0.5) == [0.0]


@CONFINED
def test_limits_are_held_and_cannot_be_lifted(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("x")
    harmful = (
        "a = bytearray(1 << 30)\n",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n",
        "open('a', 'wb').write(bytes(50 << 20))\n",
        "fs = [open('/dev/null') for _ in range(100)]\n",
        f"open({str(tmp_path / 'new')!r}, 'w')\n",
        f"import os\nos.remove({str(canary)!r})\n",
        f"import os\nos.truncate({str(canary)!r}, 0)\n",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})\n",
    )
    assert run(*(harm + RIGHT for harm in harmful)) == [0.0] * len(harmful)
    assert canary.read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["canary"]
    assert run(f"assert open({str(canary)!r}).read() == 'x'\n" + RIGHT) == [1.0]  # reading is not prevented


def test_secrets_of_the_environment_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("import os\nassert 'HF_TOKEN' not in os.environ\n" + RIGHT) == [1.0]


def test_the_share_of_tests_that_pass() -> None:
    half = ("def f(x): return 4\n", "def f(x): return 9\n", "def f(x):\n    while x == 3: pass\n    return 4\n")
    assert run(*half, partial=True, timeout_s=1.5) == [0.5] * 3
    assert run(*half[:2]) == [0.0] * 2


def test_waiting_for_a_core_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing is what counts, and no more programs run at once than there are cores for."""
    assert run("import time\ntime.sleep(1.2)\n" + RIGHT, timeout_s=1) == [1.0]
    begin = time.monotonic()
    assert run("while True: pass\n" + RIGHT, timeout_s=1) == [0.0]
    assert time.monotonic() - begin < 3.5, "ended by its computing, not by the clock"
    running, most = [], list[int]()

    def run_tests(*_: Any) -> int:
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return 2

    monkeypatch.setattr(code, "run_tests", run_tests)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert run(*[RIGHT] * 8) == [1.0] * 8
    assert max(most) == 1


def test_the_share_of_a_container_counts_as_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(workers, "CPU_MAX", tmp_path / "cpu.max")
    for text, expected in (
        ("max 100000\n", 16),
        ("250000 100000\n", 2),
        ("20000 100000\n", 1),
        ("3200000 100000\n", 16),
    ):
        workers.CPU_MAX.write_text(text)
        assert workers.cores() == expected


def test_setups_and_beginnings_of_question_sets() -> None:
    mbpp = {"test_list": ["assert f(root) == 2"], "test_setup_code": "root = Node(2)"}
    node = "class Node:\n    def __init__(self, x): self.x = x\n\ndef f(node): return node.x\n"
    assert run(node, record=mbpp) == [1.0]
    human_eval = {
        "prompt": "import math\n\ndef g(x): return x\n\ndef f(x):\n    'the root'\n",
        "test": "def check(candidate):\n    assert candidate(4) == 2\n",
        "entry_point": "f",
    }
    whole, body = "def f(x): return math.isqrt(g(x))\n", "    return math.isqrt(x)\n"
    assert run(whole, body, "    return 3\n", record=human_eval) == [1.0, 1.0, 0.0]
    assert run(RIGHT, record={"answer": "18"}) == [None]


def test_from_another_thread_with_many_open_files() -> None:
    """Where a trainer scores: numbers of pipes beyond what the program itself may open."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(run(RIGHT, *[RIGHT + "#" * 200_000] * 2)))
    thread.start()
    thread.join()
    for file in files:
        os.close(file)
    assert found == [1.0] * 3
