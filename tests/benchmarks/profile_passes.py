"""The process of one arm of `profile_step`: python -m tests.benchmarks.profile_passes GPU_STEPS SPEC.json

It starts the engine, waits for its turn, and makes all passes. What they find is kept in `report.json` after each of them.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch

from preft_cli.bench.engine import EngineSpec
from preft_cli.bench.offline import OfflineEngine
from preft_cli.bench.results import write_json
from preft_cli.bench.worker import Event, WorkerSpec, listen, tell
from preft_cli.bench.workload import Request, Workload, failure
from tests.benchmarks.profile_clock import Clock
from tests.benchmarks.profile_engine import Live, each_step
from tests.benchmarks.profile_profilers import Functions, GpuWindows
from tests.benchmarks.profile_report import MARK, PLAIN_PASSES, PROMPT, REPORT, Report


def main(gpu_steps: str, spec_path: str) -> None:
    """Be the process of one arm."""
    spec = WorkerSpec.model_validate_json(Path(spec_path).read_text())
    commands: Queue[str] = Queue()
    Thread(target=listen, args=(commands,), daemon=True).start()
    workload = Workload.model_validate_json(spec.requests.read_text())
    began = time.perf_counter()
    passes = Passes(spec.engine, workload.repetitions, int(gpu_steps))
    passes.say(f"up after {time.perf_counter() - began:.0f} s; {passes.described()}")
    tell(spec, Event(phase="started"))
    while commands.get() != "stop":
        passes.run()
        tell(spec, Event(phase="measured"))


class Passes:
    """All passes of one engine, which lives in this process."""

    def __init__(self, spec: EngineSpec, sets: list[list[Request]], gpu_steps: int) -> None:
        self._engine, self._gpu_steps = OfflineEngine(spec), gpu_steps
        self._live = Live(self._engine._llm)
        self._sets = iter(sets)
        self._path = spec.scratch / REPORT
        self._report = Report(arm=spec.arm, requests=len(sets[0]), settings=self._engine.settings)

    def described(self) -> str:
        """What matters most of the engine's settings."""
        runner = type(self._live.runner)
        names = ("async_scheduling", "cudagraph_mode", "max_num_batched_tokens", "num_gpu_blocks")
        return ", ".join([f"{name} {self._report.settings[name]}" for name in names] + [f"runner {runner.__module__}"])

    def run(self) -> None:
        """One after the other; a failure of one does not keep the others from being made."""
        for stage in (self._warm_up, *[self._plain] * PLAIN_PASSES, self._timers, self._gpu, self._functions):
            try:
                self._drain()
                stage()
            except Exception:
                text = traceback.format_exc()
                self._keep(failures=[*self._report.failures, text])
                for line in text.splitlines():
                    self.say(line)

    def say(self, text: str) -> None:
        """To the one who started this process."""
        print(f"{MARK}{self._report.arm}: {text}", flush=True)

    def _warm_up(self) -> None:
        self._keep(warm_up_s=self._answer("warm-up"))

    def _plain(self) -> None:
        self._keep(passes_s=[*self._report.passes_s, self._answer("plain")])

    def _timers(self) -> None:
        clock = Clock(self._live)
        with clock.running():
            seconds = self._answer("with timers")
        self._keep(
            timed_s=seconds,
            before_first_step_s=clock.steps[0].began - clock.began,
            gc_ms=1e3 * clock.gc_s,
            steps=clock.by_kind(),
            absent=clock.absent,
        )

    def _gpu(self) -> None:
        if not torch.cuda.is_available():
            return
        rehearsal, windows = GpuWindows(self._gpu_steps), GpuWindows(self._gpu_steps)
        rehearsal.begin(PROMPT)  # the first start of a profiler takes seconds
        rehearsal.end()
        windows.begin(PROMPT)
        try:
            with each_step(self._live, windows.step):
                self._answer("torch.profiler")
        finally:
            windows.end()
            self._keep(gpu=windows.found)

    def _functions(self) -> None:
        functions = Functions()
        with each_step(self._live, functions.step):
            functions.begin()
            try:
                seconds = self._answer("cProfile")
            finally:
                functions.end()
        self._keep(functions_s=seconds, functions=functions.top())

    def _answer(self, what: str) -> float:
        """Seconds for the next set of requests."""
        requests = next(self._sets)
        answered = self._engine.answer(requests)
        pairs = zip(requests, answered.answers, strict=True)
        if failed := [why for request, answer in pairs if (why := failure(request, *answer))]:
            raise RuntimeError(f"{len(failed)} answers are not as asked for, the first: {failed[0]}")
        self.say(f"{what}: {answered.seconds:.2f} s, {len(requests) / answered.seconds:.1f} req/s")
        return answered.seconds

    def _drain(self) -> None:
        """What a pass that failed has left, and, with asynchronous scheduling, a last step without tokens."""
        engine = self._live.engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        for _ in range(3):
            engine.step()

    def _keep(self, **found: Any) -> None:
        self._report = self._report.model_copy(update=found)
        write_json(self._report, self._path)


if __name__ == "__main__":
    main(*sys.argv[1:])
