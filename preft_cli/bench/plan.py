"""What a benchmark will do, worked out before anything is loaded (core install only)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from preft_cli.bench import arms
from preft_cli.bench.device import Device, find_device, resolve_dtype
from preft_cli.config.schema import LoadConfig, PreftConfig

CPU_BLOCK_SIZE = 32
"""The CPU engine's attention wants multiples of 32; the smallest wastes least on short requests."""

Range = tuple[int, int]
"""(low, high) number of tokens; equal for a fixed length."""


class ArmPlan(BaseModel):
    """One arm with one set of settings: its process' environment and the arguments of its engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arm: str
    variant: str | None
    """Which of the settings that are tried; None where there is one."""
    description: str
    adapters: arms.AdapterFormat
    environment: dict[str, str | None]
    """Set on top of the caller's environment; None removes a variable."""
    engine_args: dict[str, Any]
    """Arguments of `vllm.LLM`, and by the same names of the server."""

    @property
    def name(self) -> str:
        """Of the engine: `lora`, or `lora-shared-graphs`."""
        return "-".join([self.arm, *(self.variant or "").split()])

    def with_args(self, **args: Any) -> ArmPlan:
        """The same with more or other engine arguments."""
        return self.model_copy(update={"engine_args": {**self.engine_args, **args}})


class BenchPlan(BaseModel):
    """All arms, and the workload that they share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    random_weights: bool
    residual_stream: bool
    """`model.residual_stream`."""
    device: Device
    seed: int
    mode: Literal["offline", "online"]
    load: LoadConfig
    num_adapters: int
    adapter_choice: str
    zipf_exponent: float
    ranks: list[int]
    """Adapter i has rank `ranks[i % len(ranks)]`."""
    num_requests: int
    prompt_len: Range
    output_len: Range
    prompts: Path | None
    """A file of prompts, in place of random ones of `prompt_len`."""
    warmup_requests: int
    warmup_output_len: int
    repeats: int
    max_num_seqs: int
    fit_lora_slots: bool
    """Whether arms that adapt all tokens get fewer slots than adapters where memory asks for it."""
    max_engines: int | None
    """Alive at once; None for as many as memory holds."""
    gpu_memory_utilization: float
    """Share of each device's memory that all engines together may take."""
    arms: list[ArmPlan]
    notes: list[str]


def plan_bench(config: PreftConfig, root: Path) -> BenchPlan:
    """The plan of `preft bench`.

    Args:
        config: the project's config.
        root: folder of the config file; a model or a file given as a relative path is looked for there.

    Raises:
        UserError: if the arms do not make a benchmark.
    """
    bench = config.bench
    device = find_device()
    shared = engine_args(config, root, device)
    names = arms.ordered(list(bench.arms))
    output_len = as_range(bench.output_len)
    return BenchPlan(
        model=str(shared["model"]),
        random_weights=is_random(config.model.base),
        residual_stream=config.model.residual_stream,
        device=device,
        seed=config.project.seed,
        mode=bench.mode,
        load=bench.load,
        num_adapters=bench.num_adapters,
        adapter_choice=bench.adapter_choice,
        zipf_exponent=bench.zipf_exponent,
        ranks=bench.rank if isinstance(bench.rank, list) else [bench.rank],
        num_requests=bench.num_requests,
        prompt_len=as_range(bench.prompt_len),
        output_len=output_len,
        prompts=root / bench.prompts if bench.prompts else None,
        # Every adapter once, and the batch as full as it will be in the timed repetitions.
        warmup_requests=max(bench.num_adapters, min(bench.max_num_seqs, bench.num_requests)),
        warmup_output_len=min(output_len[1], 4),
        repeats=bench.repeats,
        max_num_seqs=bench.max_num_seqs,
        fit_lora_slots=bench.lora_slots is None,
        max_engines=None if bench.engines == "auto" else bench.engines,
        gpu_memory_utilization=config.serve.gpu_memory_utilization or DEFAULT_UTILIZATION[device],
        arms=[made for arm in names for made in plan_arm(arm, config, shared, device)],
        notes=notes(config, device),
    )


DEFAULT_UTILIZATION: dict[Device, float] = {"gpu": 0.92, "cpu": 0.8}
"""Of the memory that is free: vLLM's own on a GPU; on a CPU the rest of the system needs its part."""


def as_range(length: int | list[int]) -> Range:
    """A length of the config as (low, high)."""
    return (length[0], length[1]) if isinstance(length, list) else (length, length)


def plan_arm(arm: str, config: PreftConfig, shared: dict[str, Any], device: Device) -> list[ArmPlan]:
    """The shared engine arguments plus what makes this arm, for each of the settings to try."""
    kind = arms.ARMS[arm]
    return [
        ArmPlan(
            arm=arm,
            variant=variant,
            description=kind.description,
            adapters=kind.adapters,
            environment=arms.environment(kind, device, config.bench.mode),
            engine_args={**shared, **arms.adapter_args(kind, config.bench), **settings},
        )
        for variant, settings in arms.variants(arm, device, config.bench).items()
    ]


def engine_args(config: PreftConfig, root: Path, device: Device) -> dict[str, Any]:
    """Engine arguments of every arm alike: limits, lengths, seed. The sizes that depend on the model come later (`fit`)."""
    bench, serve = config.bench, config.serve
    local = root / config.model.base
    args: dict[str, Any] = {
        "model": str(local) if local.is_dir() else config.model.base,
        "dtype": resolve_dtype(bench.dtype, device),
        "seed": config.project.seed,
        "max_model_len": as_range(bench.prompt_len)[1] + as_range(bench.output_len)[1],
        "max_num_seqs": bench.max_num_seqs,
        "tensor_parallel_size": serve.tensor_parallel_size,
        "enable_prefix_caching": bench.enable_prefix_caching,
        "skip_tokenizer_init": True,
    }
    if is_random(config.model.base):
        args["load_format"] = "dummy"
    if device == "cpu":
        args |= {"enforce_eager": True, "block_size": CPU_BLOCK_SIZE}
    return args


def notes(config: PreftConfig, device: Device) -> list[str]:
    """What a reader of the numbers must know."""
    bench = config.bench
    found = []
    if is_random(config.model.base):
        found.append(f"random weights of the shape {config.model.base}: throughput only, the text means nothing")
    if resolve_dtype(bench.dtype, device) != bench.dtype:
        found.append("float32 in every arm: this processor has no instructions for bfloat16")
    if device == "cpu":
        found.append("eager mode in every arm: the CPU engine compiles nothing once LoRA is on")
    if bench.adapter_choice == "round-robin" and bench.num_requests < bench.num_adapters:
        found.append(
            f"only {bench.num_requests} of the {bench.num_adapters} adapters are used: there are fewer requests"
        )
    if bench.mode == "offline" and bench.load != LoadConfig():
        found.append("bench.load has no effect: bench.mode is offline")
    if arms.BASE not in bench.arms:
        found.append("arm base added: ratios need it")
    caching = "on, emptied before each repetition" if bench.enable_prefix_caching else "off"
    found.append(f"prefix caching {caching}; greedy sampling; every answer exactly as long as asked for")
    return found


def is_random(base: str) -> bool:
    """Whether the model name asks for random weights of a shape."""
    return base.startswith("random:")
