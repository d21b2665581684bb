"""The engine of one arm in its own process: `python -m preft_cli.bench.worker SPEC.json`.

It starts the engine, warms it up, and then does what lines on standard input say: `measure 2` answers the requests of
repetition 2, `stop` ends it. What it has to say goes to the spec's `events` file, one `Event` a line. When standard input ends,
the process that started it has died, and so does everything here.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from preft_cli.bench.engine import Answered, Engine, EngineSpec
from preft_cli.bench.results import Repetition, Started
from preft_cli.bench.workload import Request, Workload, failure

SHOWN_FAILURES = 10

GRACE_S = 10.0
"""Seconds that the engine has to stop by itself when the parent has died."""


class WorkerSpec(BaseModel):
    """All that the process needs to know."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineSpec
    requests: Path
    """A `Workload` as JSON, one file for all arms."""
    events: Path
    """One `Event` a line is appended here."""


class Event(BaseModel):
    """Something that happened."""

    model_config = ConfigDict(extra="forbid")

    phase: Literal["started", "warm", "measured"]
    started: Started | None = None
    repetition: Repetition | None = None
    """Of the warm-up too, under the number -1."""
    failed: list[str] = []
    """The first failures, in words."""


def main(arguments: list[str]) -> None:
    """Run the engine of `SPEC.json` until it is told to stop."""
    # Leave through the interpreter's exit, where the engine takes down its processes and shared memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    commands: queue.Queue[str] = queue.Queue()
    threading.Thread(target=listen, args=(commands,), daemon=True).start()
    run(WorkerSpec.model_validate_json(Path(arguments[0]).read_text()), commands)


def listen(commands: queue.Queue[str]) -> None:
    """Pass on the lines of standard input; at its end, end the whole process group: no engine outlives its benchmark."""
    pending = b""
    # Not sys.stdin: its lock, held by this thread, would break the interpreter's exit.
    while read := os.read(0, 4096):
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            commands.put(line.decode())
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def run(spec: WorkerSpec, commands: queue.Queue[str]) -> None:
    """Start the engine, warm it up, measure on demand."""
    workload = Workload.model_validate_json(spec.requests.read_text())
    began = time.perf_counter()
    engine = start_engine(spec.engine)
    started = Started(
        requests_digest=workload.digest(),
        start_seconds=time.perf_counter() - began,
        engine=engine.settings,
        patch=engine.patch,
    )
    tell(spec, Event(phase="started", started=started))
    try:
        tell(spec, measured(engine, workload.warmup, -1, "warm"))
        while (command := commands.get()) != "stop":
            number = int(command.removeprefix("measure "))
            tell(spec, measured(engine, workload.repetitions[number], number, "measured"))
    finally:
        engine.stop()


def start_engine(spec: EngineSpec) -> Engine:
    """The engine of the spec's mode, up and ready."""
    if spec.mode == "online":
        from preft_cli.bench.online import OnlineEngine

        return OnlineEngine(spec)
    from preft_cli.bench.offline import OfflineEngine

    return OfflineEngine(spec)


def measured(engine: Engine, requests: list[Request], number: int, phase: Literal["warm", "measured"]) -> Event:
    """Let the engine answer `requests` and judge what came back."""
    repetition, failed = judge(requests, engine.answer(requests, warm_up=number < 0), number)
    return Event(phase=phase, repetition=repetition, failed=failed[:SHOWN_FAILURES])


def judge(requests: list[Request], answered: Answered, number: int) -> tuple[Repetition, list[str]]:
    """Count what came back against what was asked; a missing answer is a failure of no tokens.

    Returns:
        The repetition, and all failures in words.
    """
    answers = [*answered.answers, *[(0, "no answer")] * (len(requests) - len(answered.answers))]
    pairs = zip(requests, answers, strict=True)
    failed = [reason for request, (count, finish) in pairs if (reason := failure(request, count, finish))]
    repetition = Repetition(
        number=number,
        seconds=answered.seconds,
        requests=len(requests),
        tokens_asked=sum(request.output_len for request in requests),
        tokens_produced=sum(count for count, _ in answers),
        failures=len(failed),
        counters=answered.counters,
        latency=answered.latency,
    )
    return repetition, failed


def tell(spec: WorkerSpec, event: Event) -> None:
    """Tell the parent."""
    with spec.events.open("a") as file:
        file.write(event.model_dump_json() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
