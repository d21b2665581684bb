"""What `profile_step` found: the records of one arm, and the tables for the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from pydantic import Field

from preft_cli.bench.arms import BASE
from preft_cli.bench.results import Record

PROMPT, DECODE, EMPTY = "prompt", "decode", "empty"
"""Kinds of step: some of its tokens are of prompts; none are; it has no tokens."""

PLAIN_PASSES = 2
"""After the one that warms up."""

MARK, REPORT = "profile: ", "report.json"
"""Begins the lines of a process' log that are shown; the file of what it found, in its folder."""

SHOWN_KERNELS, SHOWN_FUNCTIONS = 9, 10
"""Lines of each kind of step."""

FULL_GRAPH, PIECES, MODEL, OPS = "  forward, full graph", "  forward, pieces", "    model", "    ops"
PARTS = (
    "schedule",
    "execute",
    *("  prepare inputs", "  prepare attention", "  active adapters", "  token map", "  set adapters"),
    *(FULL_GRAPH, PIECES, MODEL, OPS),
    *("sample", "wait", "update", "outputs"),
)
"""Of a step on the host, in the order of the table; an indented one is inside another."""

COLUMN = 84


class Line(Record):
    """A kernel or a function."""

    name: str
    calls: int
    ms: float
    """In all; of a function, without what it calls."""


class Steps(Record):
    """All steps of one kind in the pass with timers. A step lasts from one `schedule` to the next.

    With asynchronous scheduling, what a step waits for and takes in (`wait`, `update`, `outputs`) is of the step before.
    """

    count: int
    tokens: float
    """Median."""
    prompt_tokens: float
    """Median."""
    wall_ms: list[float]
    """Of each step."""
    parts_ms: dict[str, float]
    """Mean of a step, by `PARTS`."""
    calls: dict[str, float]
    """Of each part in a step, mean."""
    forward_gpu_ms: float | None
    """Mean of a step: between two CUDA events around the model's forward, idle times of the GPU included."""

    @property
    def mean_ms(self) -> float:
        return sum(self.wall_ms) / self.count


class Window(Record):
    """The GPU over some steps of one kind, by torch.profiler."""

    steps: int
    events: int
    span_ms: float
    """From the first kernel to the end of the last."""
    busy_ms: float
    """Some kernel or copy ran."""
    top: list[Line]


class Report(Record):
    """Of one arm. What is empty or None was not measured."""

    arm: str
    requests: int
    settings: dict[str, Any]
    """Of the engine, as it resolved them."""
    warm_up_s: float | None = None
    passes_s: list[float] = Field(default_factory=list)
    """Nothing but the clock."""
    timed_s: float | None = None
    """The pass with timers."""
    before_first_step_s: float | None = None
    """Of `timed_s`: taking the requests in."""
    gc_ms: float | None = None
    """Of `timed_s`: Python's garbage collection."""
    steps: dict[str, Steps] = Field(default_factory=dict)
    """By kind of step."""
    absent: list[str] = Field(default_factory=list)
    """Parts that this engine does not have."""
    gpu: dict[str, Window] = Field(default_factory=dict)
    """By kind of step."""
    functions: dict[str, list[Line]] = Field(default_factory=dict)
    """The first by own time under cProfile, by kind of step; "requests": before the first step."""
    functions_s: float | None = None
    """The pass under cProfile."""
    failures: list[str] = Field(default_factory=list)
    """Tracebacks."""

    @property
    def seconds(self) -> float | None:
        return median(self.passes_s) if self.passes_s else None


def table(reports: Mapping[str, Report]) -> str:
    """Everything for the screen, in less than a hundred lines for three arms."""
    blocks = [passes(reports), parts(list(reports.values()))]
    for report in reports.values():
        if report.gpu:
            blocks.append(side_by_side(f"{report.arm}: GPU", {k: gpu_lines(w) for k, w in report.gpu.items()}))
    for report in reports.values():
        kinds = {kind: report.functions[kind] for kind in (PROMPT, DECODE) if kind in report.functions}
        if kinds:
            shown = {kind: list(map(line, lines[:SHOWN_FUNCTIONS])) for kind, lines in kinds.items()}
            blocks.append(side_by_side(f"{report.arm}: own time of functions (cProfile; ms, calls)", shown))
    for report in reports.values():
        blocks += [f"{report.arm} failed: {failure.strip().splitlines()[-1]}" for failure in report.failures]
    return "\n".join(blocks)


def passes(reports: Mapping[str, Report]) -> str:
    """A line for each arm."""
    base = reports[BASE].seconds if BASE in reports else None
    lines = []
    for name, report in reports.items():
        seconds = report.seconds
        if seconds is None:
            lines.append(f"{name}: not measured")
            continue
        over = f", {base / seconds:.3f} of base" if base else ""
        timed = "" if report.timed_s is None else f"; with timers {report.timed_s:.2f} s"
        if report.before_first_step_s is not None and report.gc_ms is not None:
            timed += f" ({report.before_first_step_s:.2f} s before the first step, {report.gc_ms:.0f} ms of gc)"
        profiled = "" if report.functions_s is None else f"; cProfile {report.functions_s:.2f} s"
        each = ", ".join(f"{one:.2f}" for one in report.passes_s)
        lines.append(f"{name}: {each} s, {report.requests / seconds:.1f} req/s{over}{timed}{profiled}")
    return "\n".join(lines)


def parts(reports: Sequence[Report]) -> str:
    """A column for each arm and kind of step."""
    columns = [(r.arm, kind, r.steps[kind]) for kind in (PROMPT, DECODE) for r in reports if kind in r.steps]
    if not columns:
        return "no steps"
    steps = [one for _, _, one in columns]
    rows: list[tuple[str, list[float | None]]] = [
        ("steps", [float(one.count) for one in steps]),
        ("tokens, median", [one.tokens for one in steps]),
        ("of prompts", [one.prompt_tokens for one in steps]),
        ("ms in all", [sum(one.wall_ms) for one in steps]),
        ("ms a step, median", [median(one.wall_ms) for one in steps]),
        ("ms a step, mean", [one.mean_ms for one in steps]),
    ]
    names = [name for name in PARTS if any(name in one.parts_ms for one in steps)]
    rows += [(name, [one.parts_ms.get(name) for one in steps]) for name in names]
    rows.append(("rest", [one.mean_ms - sum(outer(one.parts_ms)) for one in steps]))
    rows.append(("full graphs a step", [one.calls.get(FULL_GRAPH) for one in steps]))
    rows.append(("calls of ops a step", [one.calls.get(OPS) for one in steps]))
    rows.append(("forward, GPU", [one.forward_gpu_ms for one in steps]))
    head = f"{'ms a step, mean':22}" + "".join(f"{arm + ' ' + kind:>16}" for arm, kind, _ in columns)
    return "\n".join([head, *(f"{name:22}" + "".join(map(cell, values)) for name, values in rows)])


def outer(parts_ms: Mapping[str, float]) -> list[float]:
    """Of parts that are not inside others."""
    return [ms for name, ms in parts_ms.items() if not name.startswith(" ")]


def cell(value: float | None) -> str:
    """Of a table."""
    if value is None:
        return f"{'-':>16}"
    return f"{value:>16.0f}" if value == int(value) or value >= 1000 else f"{value:>16.3f}"


def gpu_lines(window: Window) -> list[str]:
    """Of one kind of step."""
    busy = f"{window.steps} steps, {window.span_ms:.1f} ms, busy {window.busy_ms:.1f} ms"
    share = f" ({window.busy_ms / window.span_ms:.0%})" if window.span_ms else ""
    return [busy + share + f", {window.events} events", *map(line, window.top[:SHOWN_KERNELS])]


def line(one: Line) -> str:
    """`12.34   567 name`."""
    return f"{one.ms:9.2f} {one.calls:7d} {one.name}"


def side_by_side(title: str, columns: Mapping[str, Sequence[str]]) -> str:
    """Prompt steps on the left, decode steps on the right."""
    head = "".join(f"{kind + ' steps':{COLUMN}}" for kind in columns).rstrip()
    rows = zip_longest(*columns.values(), fillvalue="")
    cut = ("".join(f"{text[: COLUMN - 1]:{COLUMN}}" for text in row).rstrip() for row in rows)
    return "\n".join([f"{title}: {head}", *cut])
