"""What a training run leaves behind as numbers: `result.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from preft_cli.bench.results import Hardware
from preft_cli.rl.accuracy import HeldOutAccuracy
from preft_cli.training.measure import LOSS, Measure, Measured

SCHEMA_VERSION = 1


class HeldOutLoss(Measured):
    """Mean loss per completion token (nats) on the rows of one file."""

    measure: ClassVar[Measure] = LOSS
    base: float
    adapter: float

    @property
    def base_value(self) -> float:
        return self.base

    @property
    def adapter_value(self) -> float:
        return self.adapter

    def summary(self) -> str:
        return f"base {self.base:.2f}, adapter {self.adapter:.2f} ({self.measure.change(self.adapter, self.base)})"


class LastAdapter(BaseModel):
    """The adapter of the last step, where another one is kept: it lies in the newest checkpoint."""

    model_config = ConfigDict(frozen=True)

    step: int
    validation: float | None = Field(description="Its loss on train.validation_file.")
    held_out: float | None = Field(description="Its loss on eval.file.")


class EarlierRun(BaseModel):
    """Another finished run, measured on the same held-out rows with the same base model."""

    model_config = ConfigDict(frozen=True)

    folder: Path
    adapter: str
    method: str
    ranks: dict[str, int]
    trainable_parameters: int
    steps: int
    held_out: HeldOutLoss | HeldOutAccuracy


class RunResult(BaseModel):
    """One finished run, whatever it learnt from."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = SCHEMA_VERSION
    kind: Literal["train"] = "train"
    task: Literal["sft", "grpo"]
    adapter: str = Field(description="Its name.")
    method: str
    base_model: str
    digest: str = Field(description="Content digest of the adapter.")
    steps: int
    epochs: float
    rows: int = Field(description="Training rows that fit into train.max_length: assistant turns, or problems.")
    dropped: int = Field(description="Rows that were longer.")
    held_out: Measured | None = Field(description="Of the kept adapter on held-out data; None without any.")
    trainable_parameters: int
    ranks: dict[str, int] = Field(default_factory=dict, description="By part of the method: lora, direft.")
    parameters: dict[str, int] = Field(default_factory=dict, description="Trainable ones, by part.")
    seconds: float = Field(description="Time in the training loop of this call.")
    num_processes: int = 1
    peak_memory: int | None = Field(
        None, description="Bytes, the most of all processes: of tensors on a GPU, of RAM on a CPU."
    )
    device: str
    dtype: str = Field(description="Compute type.")
    seed: int
    artefacts: dict[str, Path]
    config: dict[str, Any] = Field(description="The resolved config.")
    versions: dict[str, str]
    hardware: Hardware
    git_commit: str | None
    beside: list[EarlierRun] = Field(
        default_factory=list,
        description="Finished runs in folders beside this one that were measured on the same rows.",
    )


class TrainResult(RunResult):
    """A finished run of supervised finetuning."""

    task: Literal["sft"] = "sft"
    train_loss: float | None = Field(description="Loss of the last logged step.")
    held_out: HeldOutLoss | None = Field(description="Of the kept adapter on eval.file; None without one.")
    validation: HeldOutLoss | None = Field(None, description="The same on train.validation_file.")
    chosen_on: Literal["validation", "held-out"] | None = Field(
        None, description="The rows that decided which adapter is kept or when to stop; their loss is no unbiased one."
    )
    kept_step: int | None = Field(None, description="Step of the adapter that is kept.")
    best_step: int | None = Field(
        None, description="Step with the lowest loss while training; None: none was measured."
    )
    stopped_early: bool = Field(False, description="By train.early_stopping.")
    last: LastAdapter | None = Field(
        None, description="None where the adapter of the last step is the one that is kept."
    )
    tokens: int = Field(description="Prompt and completion tokens trained on by this call.")
    tokens_per_s: float = Field(description="Within steps, without evaluations and checkpoints.")
