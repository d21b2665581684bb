"""Ctrl-C that ends the run after the current step instead of in the middle of it."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from preft_cli.console import say
from preft_cli.errors import UserError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptedRunError(Exception):
    """Ctrl-C ended the run early; a checkpoint has been saved."""


def stopped(stop: InterruptedRunError, checkpoints: Path) -> UserError:
    """What people are told of it."""
    return UserError(
        f"stopped {stop}; a checkpoint is saved in {checkpoints}. `preft train --resume` continues from there."
    )


class InterruptRequest:
    """Inside the block the first Ctrl-C (or SIGTERM) only sets `requested`; the second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> InterruptRequest:
        # Python delivers signals to the main thread alone, and lets only that one set handlers.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        say("stopping after this step and saving a checkpoint; once more stops at once, without one")
