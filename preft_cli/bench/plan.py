"""What a benchmark will do, worked out before anything is loaded (core install only)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from preft_cli.bench import arms
from preft_cli.bench.device import Device, find_device, resolve_dtype
from preft_cli.config.schema import PreftConfig

CPU_BLOCK_SIZE = 32
"""The CPU engine's attention wants multiples of 32; the smallest wastes least on short requests."""

KV_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""Set by a user, it wins over the size that the plan works out."""


class ArmPlan(BaseModel):
    """One arm: its process' environment and the arguments of its engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arm: str
    description: str
    adapters: arms.AdapterFormat
    environment: dict[str, str | None]
    """Set on top of the caller's environment; None removes a variable."""
    engine_args: dict[str, Any]
    """Arguments of `vllm.LLM`."""


class BenchPlan(BaseModel):
    """All arms, and the workload that they share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    random_weights: bool
    residual_stream: bool
    """`model.residual_stream`."""
    device: Device
    seed: int
    num_adapters: int
    rank: int
    num_requests: int
    prompt_len: int
    output_len: int
    warmup_requests: int
    warmup_output_len: int
    repeats: int
    arms: list[ArmPlan]
    notes: list[str]

    def for_model(self, path: Path, kv_cache_bytes: int | None) -> BenchPlan:
        """The same plan with the model's folder and, on CPU, the size of the KV cache filled in."""
        found = {"model": str(path), **({} if kv_cache_bytes is None else {"kv_cache_memory_bytes": kv_cache_bytes})}
        filled = [arm.model_copy(update={"engine_args": {**arm.engine_args, **found}}) for arm in self.arms]
        return self.model_copy(update={"arms": filled})


def plan_bench(config: PreftConfig, root: Path) -> BenchPlan:
    """The plan of `preft bench`.

    Args:
        config: the project's config.
        root: folder of the config file; a model given as a relative folder is looked for there.

    Raises:
        UserError: if the arms do not make a benchmark.
    """
    bench = config.bench
    device = find_device()
    shared = engine_args(config, root, device)
    return BenchPlan(
        model=str(shared["model"]),
        random_weights=is_random(config.model.base),
        residual_stream=config.model.residual_stream,
        device=device,
        seed=config.project.seed,
        num_adapters=bench.num_adapters,
        rank=bench.rank,
        num_requests=bench.num_requests,
        prompt_len=bench.prompt_len,
        output_len=bench.output_len,
        # Every adapter once, and the batch as full as it will be in the timed repetitions.
        warmup_requests=max(bench.num_adapters, min(bench.max_num_seqs, bench.num_requests)),
        warmup_output_len=min(bench.output_len, 4),
        repeats=bench.repeats,
        arms=[plan_arm(arm, config, shared) for arm in arms.ordered(list(bench.arms))],
        notes=notes(config, device),
    )


def plan_arm(arm: str, config: PreftConfig, shared: dict[str, Any]) -> ArmPlan:
    """The shared engine arguments plus what makes this arm."""
    kind = arms.ARMS[arm]
    return ArmPlan(
        arm=arm,
        description=kind.description,
        adapters=kind.adapters,
        environment=arms.environment(kind),
        engine_args={**shared, **arms.adapter_args(kind, config.bench)},
    )


def engine_args(config: PreftConfig, root: Path, device: Device) -> dict[str, Any]:
    """Engine arguments of every arm alike: limits, lengths, seed, memory share."""
    bench, serve = config.bench, config.serve
    local = root / config.model.base
    args: dict[str, Any] = {
        "model": str(local) if local.is_dir() else config.model.base,
        "dtype": resolve_dtype(bench.dtype, device),
        "seed": config.project.seed,
        "max_model_len": bench.prompt_len + bench.output_len,
        "max_num_seqs": bench.max_num_seqs,
        "tensor_parallel_size": serve.tensor_parallel_size,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    if serve.gpu_memory_utilization is not None:
        args["gpu_memory_utilization"] = serve.gpu_memory_utilization
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
        found.append(f"KV cache in every arm sized for the workload, unless {KV_CACHE_VARIABLE} is set")
    if bench.num_requests < bench.num_adapters:
        found.append(
            f"only {bench.num_requests} of the {bench.num_adapters} adapters are used: there are fewer requests"
        )
    if "base" not in bench.arms:
        found.append("arm base added: ratios need it")
    found.append("prefix caching off; prompts never repeat; greedy sampling; arms run one after the other")
    return found


def is_random(base: str) -> bool:
    """Whether the model name asks for random weights of a shape."""
    return base.startswith("random:")
