"""The one project config, `preft.yaml`: eight sections, one pydantic model each.

Unknown keys are refused everywhere (`extra="forbid"`). Paths are relative to the folder of the config file.
Field descriptions end up in the JSON schema for editors and in the comments of `preft init`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from preft_cli.config.bench_section import BenchConfig, LoadConfig
from preft_cli.config.grpo_section import GrpoConfig, RewardConfig
from preft_cli.config.section import Arm, Dtype, Layer, Method, PositiveInt, Rank, Section
from preft_cli.config.sizes import Size
from preft_cli.config.train_section import TrainConfig

__all__ = [
    "AdapterConfig",
    "Arm",
    "BenchConfig",
    "ConvertConfig",
    "Dtype",
    "EvalConfig",
    "GrpoConfig",
    "LoadConfig",
    "Method",
    "ModelConfig",
    "PreftConfig",
    "ProjectConfig",
    "RewardConfig",
    "Section",
    "ServeConfig",
    "TrainConfig",
]


class ProjectConfig(Section):
    """Names the project and fixes its randomness."""

    name: str = Field("preft", description="A name for people; shown in results.")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of data order, initial weights and benchmark requests.")


class ModelConfig(Section):
    """The base model that every adapter of this project belongs to."""

    base: str = Field(
        "smollm2-135m",
        description="A Hub id, a local folder, the built-in smollm2-135m, or random:SHAPE for throughput work.",
    )
    chat_template: Path | None = Field(
        None, description="A Jinja chat template file; default: the tokenizer's own. Training and serving use the same."
    )
    residual_stream: bool = Field(
        False,
        description="For DiReFT on other than Llama, Qwen2 and Qwen3: declares that vLLM's decoder layers of this "
        "architecture return (hidden, residual), whose sum is the residual stream.",
    )


class AdapterConfig(Section):
    """The adapter to train."""

    name: str = Field(
        "my-adapter",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        description="Its model name on the server: letters, digits, '.', '_', '-'.",
    )
    method: Method = Field(
        "lorap",
        description="On prompt tokens only: lorap (LoRA on linear layers), direftp (DiReFT on the residual stream), "
        "lorap+direftp. On all tokens, for comparison: lora, direft, lora+direft.",
    )
    rank: Rank = Field(16, description="Rank r of the low-rank update.")
    alpha: float = Field(32.0, gt=0, description="LoRA is scaled by alpha / rank; DiReFT has no scale.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input while training.")
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(rank) instead (rank-stabilised LoRA).")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="LoRA acts on: all-linear, or module names such as [q_proj, v_proj]."
    )
    layers: Literal["all"] | Annotated[list[Layer], Field(min_length=1)] = Field(
        "all", description="DiReFT acts behind these decoder layers: all, or numbers from 0 on, such as [8, 15, 22]."
    )
    direft_rank: Rank | None = Field(None, description="Rank of the DiReFT part; default: rank.")
    orthogonal: bool = Field(
        False, description="Keep the rows of DiReFT's W2 orthonormal, as pyreft's DiReFT does; without: NoDiReFT."
    )


class ConvertConfig(Section):
    """The serving store."""

    store: Path = Field(Path("store"), description="Folder of NAME.preft files.")
    dtype: Dtype = Field(
        "auto",
        description="Type of the stored weights. auto: serve.dtype if set, else the base model's if that is bfloat16 or "
        "float16, else the adapter's own.",
    )


class ServeConfig(Section):
    """The server. Names are vLLM's own where vLLM has one."""

    adapters: Path | None = Field(None, description="Folder of adapters; default: convert.store.")
    host: str = Field("127.0.0.1", description="Address to listen on; the default is this machine only.")
    port: int = Field(8000, ge=1, le=65535)
    dtype: Dtype = Field("auto", description="Type of weights and computation.")
    tensor_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    max_model_len: PositiveInt | None = Field(None, description="Longest prompt + answer; default: the model's limit.")
    max_num_seqs: PositiveInt | None = Field(None, description="Requests that run at once; default: vLLM's.")
    max_num_batched_tokens: PositiveInt | None = Field(None, description="Tokens a step; default: vLLM's.")
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="Share of the device's memory; default: vLLM's. On CPU: of the machine's memory."
    )
    gpu_slots: PositiveInt = Field(8, description="Different adapters whose prompts one step can compute.")
    gpu_pool: Size | None = Field(
        None,
        description="Device memory for adapters, such as 512MB; default: gpu_slots of the largest, and ahead.",
    )
    host_pool: Size = Field(2 << 30, description="Host memory for adapters (pinned on a GPU machine), such as 8GiB.")
    file_cache: Size = Field(
        50 << 30, description="Disk for converted copies of adapters that are no .preft files; least recently used go."
    )
    max_lora_rank: Rank | None = Field(None, description="Largest rank served; default: the largest in the folder.")
    vllm_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Any other vLLM option, by vLLM's own name: {block-size: 32, enforce-eager: true}.",
    )


class EvalConfig(Section):
    """Held-out data."""

    file: Path | None = Field(
        None,
        description="Held-out conversations (of grpo: problems), as train.file; their loss (accuracy) is printed by train.",
    )
    split: str = Field("test", min_length=1, description="Of a data set of the Hub: the split that is held out.")
    batch_size: PositiveInt = 8


class PreftConfig(Section):
    """All of `preft.yaml`."""

    project: ProjectConfig = Field(default_factory=ProjectConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    adapter: AdapterConfig = Field(default_factory=AdapterConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    convert: ConvertConfig = Field(default_factory=ConvertConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
    bench: BenchConfig = Field(default_factory=BenchConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, data: Any) -> Any:
        """`train:` with nothing below it means the defaults, as people expect from YAML."""
        if isinstance(data, dict):
            return {key: {} if value is None and key in cls.model_fields else value for key, value in data.items()}
        return data

    @property
    def output_dir(self) -> Path:
        """Where the run of `preft train` lies."""
        return self.train.output_dir or Path("runs") / self.adapter.name

    @property
    def eval_every(self) -> int | None:
        """Steps between two evaluations while training; None: only at its end."""
        train = self.train
        made = train.grpo.environment if train.task == "grpo" else train.validation_file
        return (train.eval_every or train.save_every) if made or self.eval.file else None
