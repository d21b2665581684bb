"""The section `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from preft_cli.config.grpo_section import GrpoConfig
from preft_cli.config.section import Dtype, Fraction, PositiveInt, Section


def _tensorboard() -> list[Literal["tensorboard", "wandb"]]:
    return ["tensorboard"]


class TrainConfig(Section):
    """Supervised finetuning, or reinforcement learning."""

    task: Literal["sft", "grpo"] = Field(
        "sft", description="sft: learn the answers of train.file. grpo: learn what train.grpo rewards."
    )
    file: Path = Field(
        Path("train.jsonl"),
        description="Training conversations: a .jsonl or .parquet file, or a data set of the Hub (owner/name).",
    )
    split: str = Field(
        "train",
        min_length=1,
        description="Of a data set of the Hub: the split to train on, or configuration/split, such as main/train.",
    )
    validation_file: Path | None = Field(
        None,
        description="Conversations for early stopping, the best adapter and the choice of settings. Without it eval.file "
        "serves for these too, and its loss is then no unbiased one.",
    )
    output_dir: Path | None = Field(None, description="Default: runs/<adapter.name>.")
    epochs: float = Field(1.0, gt=0, le=1e6, description="Passes over the data; max_steps wins.")
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps; default: from epochs.")
    batch_size: PositiveInt = Field(4, description="Rows a step in each process; with packing, sequences.")
    gradient_accumulation_steps: PositiveInt = Field(1, description="Steps whose gradients are added up.")
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate. Adapters need far more than full models.")
    warmup_ratio: Fraction = Field(
        0.1, description="Share of the steps that warm up, at most all but one; then cosine decay to zero."
    )
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    max_length: PositiveInt = Field(
        1024, description="Prompt + completion tokens; longer rows are dropped and counted."
    )
    share_prompts: bool = Field(
        True,
        description="Rows with the same prompt, and the turns of a conversation, go into one step and share its computation.",
    )
    packing: bool = Field(
        False, description="Lay rows into sequences of up to max_length tokens, in which no row sees another."
    )
    padding_side: Literal["right", "left"] = Field("right", description="Where short sequences are filled up.")
    dtype: Dtype = Field("auto", description="Compute type. auto: bfloat16 where it is fast, else float32.")
    gradient_checkpointing: bool = Field(False, description="Less memory, more time, same gradients.")
    log_every: PositiveInt = Field(1, description="Steps between two lines of metrics.jsonl.")
    save_every: PositiveInt | None = Field(None, description="Steps between two checkpoints; default: only at the end.")
    eval_every: PositiveInt | None = Field(
        None, description="Steps between two evaluations on validation_file or eval.file; default: save_every."
    )
    early_stopping: PositiveInt | None = Field(
        None, description="Stop after that many evaluations in a row without a lower loss; default: never."
    )
    keep: Literal["best", "last"] | None = Field(
        None, description="Which adapter the run leaves; default: best if it evaluates on the way, else last."
    )
    report_to: list[Literal["tensorboard", "wandb"]] = Field(
        default_factory=_tensorboard, description="Boards beside metrics.jsonl; [] for none. wandb is installed apart."
    )
    num_processes: PositiveInt = Field(
        1, description="Processes on this machine, one a GPU (or sharing the CPU's cores); batch_size is that of each."
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="With several processes: a copy of the base model in each (ddp), or a share of it (fsdp)."
    )
    grpo: GrpoConfig = Field(default_factory=GrpoConfig)
    quantize_base: Literal["8bit", "4bit"] | None = Field(
        None, description="Train on a base model quantised by bitsandbytes, which is installed apart; less memory."
    )
