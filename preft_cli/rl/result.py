"""The `result.json` of an RL run, and of either kind of run."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import ConfigDict, Field

from preft_cli.rl.accuracy import HeldOutAccuracy
from preft_cli.rl.summary import RunSummary
from preft_cli.training.result import RunResult, TrainResult


class RlResult(RunResult):
    """A finished run of reinforcement learning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: Literal["grpo"] = "grpo"
    held_out: HeldOutAccuracy | None = Field(description="On held-out problems; None without any.")
    summary: RunSummary

    @property
    def tokens_per_s(self) -> float:
        """Sampled by the engine while it was sampling."""
        return self.summary.generated_tokens_per_s


def parse_result(text: bytes) -> TrainResult | RlResult:
    """The content of a `result.json`.

    Raises:
        ValueError: it is none.
    """
    found = json.loads(text)
    if isinstance(found, dict) and found.get("task") == "grpo":
        return RlResult.model_validate(found)
    return TrainResult.model_validate(found)
