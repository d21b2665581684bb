"""What the steps of an RL run say together, from the rows of its metrics."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from preft_cli.bench.results import Record

ENDS = 10
"""Steps at the beginning and at the end whose mean reward is told."""
PARTS = ("generation", "rewards", "sync", "training")
"""Of a step's time, as in `seconds_generation`."""


class StepShares(Record):
    """Where the time of the steps went, as shares of it."""

    generation: float
    rewards: float
    sync: float
    training: float
    rest: float = Field(description="Waiting, copying, collating; not evaluations and checkpoints, which are no steps.")


class SyncNumbers(Record):
    """How new weights came into the engine."""

    number: int
    median_ms: float
    largest_ms: float
    num_bytes: int = Field(description="Of one.")


class RunSummary(Record):
    """Of all steps, those before a resume included."""

    reward_first: float | None = Field(description="Mean reward of the first ten steps.")
    reward_last: float | None = Field(description="Of the last ten.")
    shares: StepShares | None
    sync: SyncNumbers | None = Field(description="None: no weights were sent.")
    logprob_gap_mean: float | None = Field(description="|trainer - engine|, nats per sampled token.")
    logprob_gap_max: float | None
    tied_share: float | None = Field(description="Of the groups: all answers earned the same.")
    steps_without_signal: int = Field(description="Steps in which that was so for all groups.")
    cut_share: float | None = Field(description="Of the answers: cut at train.grpo.max_completion_length.")
    generated_tokens: int
    generated_tokens_per_s: float = Field(description="While the engine was sampling.")

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]]) -> RunSummary:
        """From `Metrics.rows()`."""
        steps = [row for row in rows if row["kind"] == "train"]
        rewards = column(steps, "reward_mean")
        tokens, seconds = sum(column(steps, "generated_tokens")), sum(column(steps, "seconds_generation"))
        return cls(
            reward_first=_mean(rewards[:ENDS]),
            reward_last=_mean(rewards[-ENDS:]),
            shares=_shares(steps),
            sync=_sync(steps),
            logprob_gap_mean=_mean(column(steps, "logprob_gap_mean")),
            logprob_gap_max=max(column(steps, "logprob_gap_max"), default=None),
            tied_share=_mean(column(steps, "tied_share")),
            steps_without_signal=sum(share >= 1 for share in column(steps, "tied_share")),
            cut_share=_mean(column(steps, "cut_share")),
            generated_tokens=int(tokens),
            generated_tokens_per_s=round(tokens / seconds, 1) if seconds else 0.0,
        )


def column(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    """The values of `key`, in the order of the rows; rows without one are passed over."""
    return [row[key] for row in rows if row.get(key) is not None]


def _shares(steps: Sequence[dict[str, Any]]) -> StepShares | None:
    total = sum(column(steps, "seconds_total"))
    if total <= 0:
        return None
    shares = {part: sum(column(steps, f"seconds_{part}")) / total for part in PARTS}
    return StepShares(**shares, rest=max(0.0, 1 - sum(shares.values())))


def _sync(steps: Sequence[dict[str, Any]]) -> SyncNumbers | None:
    sent = [row for row in steps if row.get("sync_bytes")]
    if not sent:
        return None
    times = [1000 * seconds for seconds in column(sent, "seconds_sync")]
    return SyncNumbers(
        number=len(sent),
        median_ms=statistics.median(times),
        largest_ms=max(times),
        num_bytes=max(row["sync_bytes"] for row in sent),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
