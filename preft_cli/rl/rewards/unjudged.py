"""Answers that the judging process could not judge: they count as wrong, and the user hears of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from preft_cli.console import warn
from preft_cli.errors import UserError

DIED, TIMED_OUT, FAILED = "ended the judging process", "took too long", "made the judge fail"
SILENT_S = 600.0
"""At least so long between two warnings of the same reward."""
MANY = 8
"""So many answers, all of them unjudged, are no accident."""


class Verdict(NamedTuple):
    """On one answer."""

    score: float
    fate: str | None = None
    """One of `DIED`, `TIMED_OUT` and `FAILED`; None: it was judged."""
    reason: str = ""


class Unjudged:
    """Counts them over the life of one judge."""

    def __init__(self, judge: str) -> None:
        self._judge = judge
        self._works = False
        self._counts: Counter[str] = Counter()
        self._told_at: float | None = None

    def note(self, jobs: Sequence[Any], verdicts: Sequence[Verdict]) -> None:
        """Warn of those among `verdicts`, now and then, with one example.

        Raises:
            UserError: none of many was judged, not for their length: the judge is broken, and all rewards would be 0.
        """
        unjudged = [(job, one) for job, one in zip(jobs, verdicts, strict=True) if one.fate is not None]
        self._works = self._works or len(unjudged) < len(verdicts)
        if not unjudged:
            return
        fates = Counter(str(verdict.fate) for _, verdict in unjudged)
        # Some environments fail on every text that is no number, as those of a beginner are: no reason to stop a judge that
        # has judged before.
        stops = (DIED,) if self._works else (DIED, FAILED)
        if len(unjudged) == len(verdicts) >= MANY and set(fates) <= set(stops):
            raise UserError(
                f"train.grpo.rewards: not one of {len(verdicts)} answers could be judged ({self._judge}): {_counted(fates)}; "
                f"{_example(*unjudged[0])}. Check the data and the settings of the reward."
            )
        self._counts += fates
        if self._told_at is None or time.monotonic() - self._told_at >= SILENT_S:
            warn(
                f"answers that could not be judged count as wrong ({self._judge}): {_counted(self._counts)}; "
                f"{_example(*unjudged[0])}"
            )
            self._told_at = time.monotonic()
            self._counts.clear()


def _counted(fates: Counter[str]) -> str:
    return ", ".join(f"{count} {fate}" for fate, count in fates.items())


def _example(job: Any, verdict: Verdict) -> str:
    text = repr(job)
    text = text if len(text) <= 160 else f"{text[:157]}..."
    return f"such as {text}, which {verdict.fate}" + (f": {verdict.reason}" if verdict.reason else "")
