"""What people see: messages and progress on stderr, results on stdout.

    from preft_cli.console import progress, say, warn

    say("loading the base model")
    with progress("training", total=200, unit="steps") as bar:
        for step in range(200):
            ...
            bar.update(step + 1, note="loss 2.31, 1200 tok/s")

Stdout is kept for results alone (tables, `--json` documents), so that it can be piped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

err = Console(stderr=True)
"""Everything that is not a result."""

out = Console()
"""Results for people: tables and summaries."""

PLAIN_INTERVAL_S = 15.0
"""Seconds between two lines without a terminal. Half of the promised 30, so that a busy machine keeps the promise."""


def say(message: str) -> None:
    """Print one message on stderr as it is: brackets in it are text, not rich markup, and long lines are not folded."""
    err.print(message, markup=False, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    """Print `warning: message` on stderr."""
    _labelled("warning:", "yellow", message)


def error(message: str) -> None:
    """Print `error: message` on stderr. Commands raise `UserError` instead, unless several things went wrong."""
    _labelled("error:", "bold red", message)


def _labelled(label: str, style: str, message: str) -> None:
    err.print(label, style=style, end=" ", highlight=False)
    say(message)


class Progress(Protocol):
    """One long phase. `completed` and `total` count the same unit: steps, rows, requests, bytes."""

    def update(self, completed: float | None = None, note: str | None = None, total: float | None = None) -> None:
        """Set how much is done, the text after the counts, or the total; what is left out stays as it was."""

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """Add to how much is done."""


@contextmanager
def progress(description: str, total: float | None = None, unit: str = "") -> Iterator[Progress]:
    """Show a phase while its body runs: a bar on a terminal, plain lines anywhere else.

    Plain lines come at the start, at the end, and every `PLAIN_INTERVAL_S` seconds from a thread, hence also while the
    body is stuck in one long call (loading, tokenising, capturing graphs). `total=None`: the length is not known.
    The first argument of `update` is the absolute count so far, not an increment.
    """
    shown: _Bar | _Plain = _Bar(description, total, unit) if err.is_terminal else _Plain(description, total, unit)
    shown.start()
    try:
        yield shown
    except BaseException:
        shown.stop(finished=False)
        raise
    shown.stop(finished=True)


def duration(seconds: float) -> str:
    """`59s`, `4m05s`, `2h03m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class _Bar:
    """A rich bar on a terminal."""

    def __init__(self, description: str, total: float | None, unit: str) -> None:
        counts = "" if total is None else "{task.completed:g}/{task.total:g} " + unit
        self._rich = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn(counts, markup=False),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=err,
        )
        self._task: TaskID = self._rich.add_task(description, total=total, note="")

    def start(self) -> None:
        self._rich.start()

    def update(self, completed: float | None = None, note: str | None = None, total: float | None = None) -> None:
        self._rich.update(self._task, completed=completed, total=total)
        self._note(note)

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        self._rich.update(self._task, advance=amount)
        self._note(note)

    def _note(self, note: str | None) -> None:
        if note is not None:
            self._rich.update(self._task, note=note)

    def stop(self, *, finished: bool) -> None:
        self._rich.stop()


@dataclass
class _Plain:
    """Lines for logs and pipes: `training: 40/200 steps, loss 2.31, 12s so far, 48s left`."""

    description: str
    total: float | None
    unit: str
    interval_s: float = field(default_factory=lambda: PLAIN_INTERVAL_S)
    completed: float = 0
    note: str = ""

    def start(self) -> None:
        self._started = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="preft-progress", daemon=True)
        size = "" if self.total is None else f", {self.total:g} {self.unit}".rstrip()
        say(f"{self.description}: started{size}")
        self._thread.start()

    def _tick(self) -> None:
        while not self._done.wait(self.interval_s):
            say(self.line())

    def update(self, completed: float | None = None, note: str | None = None, total: float | None = None) -> None:
        self.completed = self.completed if completed is None else completed
        self.note = self.note if note is None else note
        self.total = self.total if total is None else total

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        self.update(self.completed + amount, note)

    def stop(self, *, finished: bool) -> None:
        self._done.set()
        self._thread.join()
        say(self.line("done" if finished else "stopped"))

    def line(self, state: str = "") -> str:
        """The line for now; `state` ends the phase and leaves the time left out."""
        elapsed = time.monotonic() - self._started
        parts = [state, self._counts(), self.note, self._times(elapsed, state)]
        return f"{self.description}: " + ", ".join(part for part in parts if part)

    def _counts(self) -> str:
        if self.total is None and not self.completed:
            return ""
        of_total = "" if self.total is None else f"/{self.total:g}"
        return f"{self.completed:g}{of_total} {self.unit}".rstrip()

    def _times(self, elapsed: float, state: str) -> str:
        if state:
            return duration(elapsed)
        if not self.total or not self.completed:
            return f"{duration(elapsed)} so far"
        left = elapsed / self.completed * max(self.total - self.completed, 0)
        return f"{duration(elapsed)} so far, about {duration(left)} left"
