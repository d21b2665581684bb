"""Timers around the parts of every step of an engine."""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from tests.benchmarks.profile_engine import Live, PromptCounter, kind_of, replaced
from tests.benchmarks.profile_report import FULL_GRAPH, MODEL, PARTS, PIECES, Steps


class Step:
    """From one `schedule` to the next."""

    def __init__(self, began: float, output: Any) -> None:
        self.began, self.output = began, output
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.events: list[Any] = []
        """CUDA's, before and after each forward."""


def recorded() -> Any:
    """A CUDA event on the current stream."""
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Clock:
    """Times the parts of every step while its context is entered."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.steps: list[Step] = []
        self.absent: list[str] = []
        self.gc_s = 0.0
        self.began = self.ended = 0.0
        """Of `LLM.generate`."""
        self._in_forward = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """The methods are back in place afterwards."""
        undo = []
        gc.callbacks.append(self._collect)
        try:
            undo.append(replaced(self._live.llm, "generate", self._generate))
            undo.append(replaced(self._live.scheduler, "schedule", self._schedule))
            for part, owner, name in self._live.timed_parts():
                if getattr(owner, name, None) is None:
                    self.absent.append(f"{part.strip()}: {name}")
                else:
                    undo.append(replaced(owner, name, partial(self._timer, part)))
            yield
        finally:
            gc.callbacks.remove(self._collect)
            for back in reversed(undo):
                back()

    def _generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Any:
            self.began = time.perf_counter()
            outputs = original(*args, **kwargs)
            self.ended = time.perf_counter()
            return outputs

        return generate

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            output = original(*args, **kwargs)
            step = Step(began, output)
            self.steps.append(step)
            step.seconds["schedule"] = time.perf_counter() - began
            return output

        return schedule

    def _timer(self, part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        is_forward = part in (FULL_GRAPH, PIECES, MODEL) and torch.cuda.is_available()

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.steps:
                return original(*args, **kwargs)
            step, outermost = self.steps[-1], is_forward and not self._in_forward
            if outermost:
                self._in_forward = True
                step.events.append(recorded())
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                step.seconds[part] += time.perf_counter() - began
                step.calls[part] += 1
                if outermost:
                    self._in_forward = False
                    step.events.append(recorded())

        return timed

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        self.gc_s += time.perf_counter() if phase == "stop" else -time.perf_counter()

    def by_kind(self) -> dict[str, Steps]:
        """What the steps of each kind took."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ends = [*(step.began for step in self.steps[1:]), self.ended]
        count = PromptCounter()
        rows: defaultdict[str, list[tuple[Step, float, int]]] = defaultdict(list)
        for step, end in zip(self.steps, ends, strict=True):
            tokens = count(step.output)
            rows[kind_of(step.output, tokens)].append((step, end - step.began, tokens))
        return {kind: summed_up(of) for kind, of in sorted(rows.items(), reverse=True)}


def summed_up(rows: Sequence[tuple[Step, float, int]]) -> Steps:
    """The steps of one kind: (step, seconds, prompt tokens)."""
    steps = [step for step, _, _ in rows]
    seen = [part for part in PARTS if any(part in step.seconds for step in steps)]
    gpu = [sum(a.elapsed_time(b) for a, b in zip(step.events[::2], step.events[1::2], strict=True)) for step in steps]
    return Steps(
        count=len(rows),
        tokens=median(step.output.total_num_scheduled_tokens for step in steps),
        prompt_tokens=median(tokens for _, _, tokens in rows),
        wall_ms=[round(1e3 * seconds, 4) for _, seconds, _ in rows],
        parts_ms={part: 1e3 * fmean(step.seconds.get(part, 0.0) for step in steps) for part in seen},
        calls={part: fmean(step.calls[part] for step in steps) for part in seen if part != "schedule"},
        forward_gpu_ms=fmean(gpu) if any(step.events for step in steps) else None,
    )
