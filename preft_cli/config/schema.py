"""The one project config, `preft.yaml`: eight sections, one pydantic model each.

Unknown keys are refused everywhere (`extra="forbid"`). Paths are relative to the folder of the config file.
Field descriptions end up in the JSON schema for editors and in the comments of `preft init`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from preft_cli.config.sizes import Size

Method = Literal["lorap", "direftp", "lorap+direftp", "lora", "direft", "lora+direft"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Arm = Literal["base", "lora", "lorap", "direftp", "direft"]

# No count of steps, tokens or adapters comes near the bound; libraries fail in strange ways beyond it.
PositiveInt = Annotated[int, Field(gt=0, le=2**31 - 1)]
Rank = Annotated[int, Field(gt=0, le=512)]
Layer = Annotated[int, Field(strict=True, ge=0, le=9999)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Milliseconds = Annotated[float, Field(gt=0)]
Length = PositiveInt | Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
"""Tokens: a number, or [low, high] to draw from evenly."""


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of: `PositiveInt | None` gives int and NoneType."""
    return {annotation} | {kind for part in get_args(annotation) for kind in _kinds(part)}


class Section(BaseModel):
    """Base of every section: no unknown keys, no silent changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes `learning_rate: true` for 1.0; a person never means that."""
        if isinstance(value, bool) and info.field_name in cls.model_fields:
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise PydanticCustomError("bool_for_number", "expected a number")
        return value


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


class TrainConfig(Section):
    """Supervised finetuning."""

    file: Path = Field(Path("train.jsonl"), description="Training conversations, JSONL.")
    validation_file: Path | None = Field(
        None, description="Conversations to choose settings by, JSONL; eval.file stays for the final number only."
    )
    output_dir: Path | None = Field(None, description="Default: runs/<adapter.name>.")
    epochs: float = Field(1.0, gt=0, le=1e6, description="Passes over the data; max_steps wins.")
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps; default: from epochs.")
    batch_size: PositiveInt = Field(4, description="Rows a step on each device.")
    gradient_accumulation_steps: PositiveInt = Field(1, description="Steps whose gradients are added up.")
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate. Adapters need far more than full models.")
    warmup_ratio: Fraction = Field(0.1, description="Share of the steps that warm up; then cosine decay to zero.")
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    max_length: PositiveInt = Field(
        1024, description="Prompt + completion tokens; longer rows are dropped and counted."
    )
    dtype: Dtype = Field("auto", description="Compute type. auto: bfloat16 where it is fast, else float32.")
    gradient_checkpointing: bool = Field(False, description="Less memory, more time, same gradients.")
    log_every: PositiveInt = Field(1, description="Steps between two lines of metrics.jsonl.")
    save_every: PositiveInt | None = Field(None, description="Steps between two checkpoints; default: only at the end.")


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


def _all_arms() -> list[Arm]:
    return ["base", "lora", "lorap"]


class LoadConfig(Section):
    """How requests arrive at the server, for `bench.mode: online`."""

    request_rate: float | None = Field(
        None, gt=0, description="Open loop: requests a second, Poisson arrivals. Default: closed loop."
    )
    max_concurrency: PositiveInt | None = Field(
        None,
        description="Requests in flight at most; default: bench.max_num_seqs in a closed loop, no limit in an open one.",
    )
    goodput: dict[Literal["ttft", "tpot", "e2el"], Milliseconds] = Field(
        default_factory=dict,
        description="Limits in milliseconds, such as {ttft: 500, tpot: 50}: requests within all of them make the goodput.",
    )


class BenchConfig(Section):
    """Throughput of arms on the same requests."""

    mode: Literal["offline", "online"] = Field(
        "offline", description="offline: all requests at once. online: through the OpenAI server, under bench.load."
    )
    arms: list[Arm] = Field(default_factory=_all_arms, min_length=1)
    num_adapters: PositiveInt = Field(8, description="Distinct adapters that the requests use.")
    adapter_choice: Literal["round-robin", "uniform", "zipf"] = Field(
        "round-robin", description="Which adapter a request gets: in turn, any alike, or few adapters most of the time."
    )
    zipf_exponent: float = Field(
        1.0, gt=0, le=10, description="Of zipf: the k-th adapter is asked for k^-a times as often."
    )
    rank: Rank | Annotated[list[Rank], Field(min_length=1)] = Field(
        8, description="Rank of the adapters; a list such as [8, 16, 64] gives them ranks in turn."
    )
    num_requests: PositiveInt = 32
    prompt_len: Length = Field(
        64, description="Prompt tokens of a request; [8, 512] draws them evenly between the two."
    )
    output_len: Length = Field(32, description="Tokens to generate for a request; [8, 512] as for prompt_len.")
    prompts: Path | None = Field(
        None, description="JSONL of conversations whose prompts are used, in place of random tokens of prompt_len."
    )
    max_num_seqs: PositiveInt = Field(32, description="Requests that run at once.")
    gpu_slots: PositiveInt = Field(8, description="Adapters whose prompts one step can compute, in preft's arms.")
    lora_slots: PositiveInt | None = Field(
        None, description="Adapter slots of stock multi-LoRA; default: as many as fit, up to num_adapters."
    )
    lora_graphs: Literal["both", "specialised", "shared"] = Field(
        "both",
        description="CUDA graphs of stock multi-LoRA: further sets for fewer or no adapters (specialised), one set with LoRA "
        "for all batches (shared), or both in turn, and the faster one counts. A CPU has none.",
    )
    repeats: PositiveInt = Field(3, description="Timed repetitions of each arm; the median counts.")
    engines: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="Engines that are alive at once and take turns; auto: as many as memory holds. 1: each is started anew "
        "for every repetition.",
    )
    enable_prefix_caching: bool = Field(False, description="On, prompts that begin alike share their KV cache.")
    load: LoadConfig = Field(default_factory=LoadConfig)
    dtype: Dtype = "auto"

    @field_validator("prompt_len", "output_len")
    @classmethod
    def _low_before_high(cls, value: int | list[int]) -> int | list[int]:
        if isinstance(value, list) and value[0] > value[1]:
            raise PydanticCustomError("range", "expected [low, high], low first")
        return value


class EvalConfig(Section):
    """Held-out data."""

    file: Path | None = Field(None, description="Held-out conversations, JSONL; their loss is printed by train.")
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
