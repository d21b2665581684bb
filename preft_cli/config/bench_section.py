"""The section `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from preft_cli.config.section import Arm, Dtype, Length, Milliseconds, PositiveInt, Rank, Section


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
        None,
        description="JSONL or Parquet of conversations whose prompts are used, in place of random tokens of prompt_len.",
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
