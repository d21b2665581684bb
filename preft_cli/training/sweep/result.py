"""What a sweep leaves behind as numbers: `sweep.json`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import AliasChoices, Field

from preft_cli.bench.results import Hardware, Record
from preft_cli.rl.accuracy import ConstantAnswer, HeldOutAccuracy
from preft_cli.rl.curve import LearningCurve
from preft_cli.training.measure import MEASURES, Measure, Name
from preft_cli.training.result import HeldOutLoss


class CellResult(Record):
    """One run."""

    name: str = Field(description="Its folder below the sweep's.")
    settings: dict[str, Any] = Field(description="The swept keys' values.")
    method: str
    rank: int = Field(description="adapter.rank")
    seed: int
    held_out: HeldOutLoss | HeldOutAccuracy | None = Field(None, description="On eval.file, or on held-out problems.")
    validation: HeldOutLoss | None = Field(None, description="On train.validation_file.")
    train_loss: float | None = None
    curve: LearningCurve | None = Field(None, description="Rewards and accuracies while training, of train.task grpo.")
    trainable_parameters: int | None = None
    steps: int | None = None
    seconds: float | None = Field(None, description="In the training loop.")
    tokens_per_s: float | None = None
    device: str | None = None
    dtype: str | None = None
    git_commit: str | None = None
    error: str | None = Field(None, description="Why nothing was measured.")


class OverSeeds(Record):
    """A loss or an accuracy over seeds."""

    by_seed: dict[int, float]
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, by_seed: Mapping[int, float]) -> OverSeeds:
        """Of at least one seed."""
        values = list(by_seed.values())
        return cls(by_seed=dict(by_seed), mean=statistics.fmean(values), low=min(values), high=max(values))


class Candidate(Record):
    """One value of the chosen keys."""

    settings: dict[str, Any]
    validation: OverSeeds | None = Field(description="None if it has failed for some seed, or is not done yet.")


class Point(Record):
    """One mark of the picture: a combination of values, without the seed and without what is chosen."""

    line: str = Field(description="What it is drawn with: the method, and other values.")
    settings: dict[str, Any]
    method: str
    rank: int
    trainable_parameters: int | None
    held_out: OverSeeds | None = Field(description="Of the chosen values; None if nothing could be chosen or measured.")
    chosen: dict[str, Any]
    at_edge: list[str] = Field(description="Chosen keys whose value is the smallest or largest of those tried.")
    candidates: list[Candidate] = Field(description="What was chosen among.")
    failed: list[str] = Field(description="Names of the cells that were not measured, of all candidates.")


class SweepResult(Record):
    """All runs of a grid."""

    schema_version: Literal[1] = 1
    kind: Literal["train_sweep"] = "train_sweep"
    created: datetime
    command: str
    base_model: str
    measure: Name = Field(
        "loss", description="What is measured on held-out rows: loss, or the accuracy of train.task grpo."
    )
    base: float | None = Field(
        validation_alias=AliasChoices("base", "base_loss"), description="The base model's held-out loss or accuracy."
    )
    swept: dict[str, list[Any]] = Field(description="Values by key, in the order of the options.")
    choose: list[str]
    complete: bool = Field(description="False while runs are left to do.")
    cells: list[CellResult]
    points: list[Point]
    notes: list[str] = Field(description="What a reader should know.")
    config: dict[str, Any] = Field(description="What the runs have in common: the resolved config.")
    versions: dict[str, str]
    hardware: Hardware
    git_commit: str | None
    seconds: float = Field(description="Of this call; runs that were finished before took none of it.")
    jobs: int

    @property
    def failed(self) -> list[CellResult]:
        """The runs that were not measured."""
        return [cell for cell in self.cells if cell.error is not None]

    @property
    def measured(self) -> Measure:
        """How to read the numbers."""
        return MEASURES[self.measure]

    @property
    def base_accuracy(self) -> HeldOutAccuracy | None:
        """What the first run measured: the base model's accuracy with its interval, and the best constant answer's."""
        return next((cell.held_out for cell in self.cells if isinstance(cell.held_out, HeldOutAccuracy)), None)

    @property
    def constant(self) -> ConstantAnswer | None:
        """The best constant answer."""
        return self.base_accuracy.constant if self.base_accuracy else None
