"""torch.profiler and cProfile, told apart by kind of step; `profile_engine.each_step` calls their `step`."""

from __future__ import annotations

import cProfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from tests.benchmarks.profile_report import DECODE, PROMPT, Line, Window

SETTLE = 8
"""Decode steps before those that the GPU profiler sees."""

KERNELS, FUNCTIONS, NAME = 25, 40, 90


class GpuWindows:
    """torch.profiler over the first steps with prompts, and over some decode steps later."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        """Steps of a window."""
        self._kind: str | None = None
        self._steps = self._settled = 0
        self._profiler: Any = None
        self.found: dict[str, Window] = {}

    def begin(self, kind: str) -> None:
        """Open the window on steps of this kind."""
        torch.cuda.synchronize()
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()
        self._kind, self._steps = kind, 0

    def end(self) -> None:
        """Close the window that is open, if one is."""
        if self._kind is None:
            return
        torch.cuda.synchronize()
        self._profiler.stop()
        kind, self._kind = self._kind, None
        if self._steps:
            # Not `events()` or `key_averages()`: they make a Python object with parents and children of every event.
            self.found[kind] = window(self._profiler.profiler.kineto_results.events(), self._steps)

    def step(self, kind: str) -> None:
        """A step is scheduled."""
        if self._kind is not None:
            if kind != self._kind or self._steps == self._limit:
                self.end()
            else:
                self._steps += 1
        elif kind == DECODE and DECODE not in self.found:
            self._settled += 1
            if self._settled > SETTLE:
                self.begin(DECODE)
                self._steps = 1


def window(events: Sequence[Any], steps: int) -> Window:
    """From kineto's events."""
    on_gpu = [e for e in events if e.device_type() == DeviceType.CUDA and not annotation(e)]
    intervals = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_gpu)
    busy, until = 0, 0
    for start, end in intervals:
        busy += max(0, end - max(start, until))
        until = max(until, end)
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for e in on_gpu:
        total = totals[e.name()[:NAME]]
        total[0] += 1
        total[1] += e.duration_ns()
    top = sorted(totals.items(), key=lambda item: -item[1][1])[:KERNELS]
    return Window(
        steps=steps,
        events=len(on_gpu),
        span_ms=(until - intervals[0][0]) / 1e6 if intervals else 0.0,
        busy_ms=busy / 1e6,
        top=[Line(name=name, calls=calls, ms=ns / 1e6) for name, (calls, ns) in top],
    )


def annotation(event: Any) -> bool:
    """Whether it is a range that somebody named, not work of the GPU."""
    with suppress(AttributeError):
        return bool(event.is_user_annotation())
    return False


class Functions:
    """cProfile of this thread, by kind of step."""

    def __init__(self) -> None:
        self._profiles = {"requests": cProfile.Profile(), PROMPT: cProfile.Profile(), DECODE: cProfile.Profile()}
        self._kind = "requests"

    def begin(self) -> None:
        """The first step is to come."""
        self._profiles[self._kind].enable()

    def end(self) -> None:
        """The last step is over."""
        self._profiles[self._kind].disable()

    def step(self, kind: str) -> None:
        """A step is scheduled: `schedule` itself counts to the step before."""
        if kind != self._kind:
            self.end()
            self._kind = kind
            self.begin()

    def top(self) -> dict[str, list[Line]]:
        """The first by own time."""
        return {kind: top_functions(profile) for kind, profile in self._profiles.items()}


def top_functions(profile: cProfile.Profile) -> list[Line]:
    """The first by own time."""
    entries = sorted(profile.getstats(), key=lambda entry: -entry.inlinetime)[:FUNCTIONS]
    return [Line(name=function_name(e.code), calls=e.callcount, ms=1e3 * e.inlinetime) for e in entries]


def function_name(code: Any) -> str:
    """`model_runner.py:1719 GPUModelRunner.execute_model`; a string of cProfile's for what is not Python."""
    if isinstance(code, str):
        return code[:NAME]
    name = getattr(code, "co_qualname", code.co_name)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} {name}"[:NAME]
