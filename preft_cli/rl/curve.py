"""How one RL run went: rewards by step, and the accuracies that were measured on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from preft_cli.bench.results import Record


class LearningCurve(Record):
    """What is drawn of a run beside others."""

    rewards: dict[int, float] = Field(description="Mean reward of the answers, by step.")
    accuracies: dict[int, float] = Field(description="On the held-out problems, by step; at step 0 the base model's.")


def curve_of(rows: Sequence[dict[str, Any]]) -> LearningCurve:
    """From `Metrics.rows()`."""
    rewards = {row["step"]: round(row["reward_mean"], 4) for row in rows if row.get("reward_mean") is not None}
    measured = sorted(
        (row["step"], row["accuracy"]) for row in rows if "accuracy" in row and row["split"] == "held-out"
    )
    return LearningCurve(rewards=rewards, accuracies=dict(measured))
