"""The arms of a benchmark: what each adds to the engine that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine_patch.rule import is_prefill_only
from preft_cli.bench.device import Device
from preft_cli.config.schema import BenchConfig
from preft_cli.errors import UserError
from preft_cli.serving.adapters import LORA_RANKS

BASE = "base"
"""Every benchmark has this arm: a ratio without it says nothing about what adapters cost."""

AdapterFormat = Literal["none", "peft", "preft"]


@dataclass(frozen=True)
class ArmKind:
    """One way to serve the workload."""

    description: str
    adapters: AdapterFormat
    """The form of the adapter files that the arm loads."""
    method: str | None
    """The adapters' method; None without adapters."""
    plugin: bool
    """Whether preft's engine plugin is on. Without it the arm is the stock engine."""

    @property
    def adapts_all_tokens(self) -> bool:
        """Then a request holds its adapter's slot to its end."""
        return self.method is not None and not is_prefill_only(self.method)


ARMS: dict[str, ArmKind] = {
    BASE: ArmKind("stock engine, no adapters", "none", None, plugin=False),
    "lora": ArmKind("stock engine, its own multi-LoRA, all tokens adapted", "peft", "lora", plugin=False),
    "lorap": ArmKind("preft, LoRA on prompt tokens", "preft", "lorap", plugin=True),
    "direftp": ArmKind("preft, DiReFT on prompt tokens", "preft", "direftp", plugin=True),
    "direft": ArmKind("preft, DiReFT on all tokens", "preft", "direft", plugin=True),
}

SHARED_GRAPHS = {"compilation_config": {"cudagraph_specialize_lora": False}}
"""One set of CUDA graphs, with LoRA, for all batches; by default vLLM has further sets for fewer or no adapters."""


def ordered(arms: list[str]) -> list[str]:
    """The arms to run, in order: as asked for, with `base` put first.

    Raises:
        UserError: for an arm named twice, or one that does not exist.
    """
    for arm in arms:
        if arm not in ARMS:
            raise UserError(f"bench.arms: there is no arm {arm!r}; known: {', '.join(ARMS)}", exit_code=2)
    if len(set(arms)) != len(arms):
        raise UserError(f"bench.arms: an arm is named twice in {', '.join(arms)}; name each once", exit_code=2)
    return [BASE, *(arm for arm in arms if arm != BASE)]


def variants(arm: str, device: Device, bench: BenchConfig) -> dict[str | None, dict[str, Any]]:
    """Settings of the arm that are tried, by name: the better one counts. Most arms have one, without a name."""
    if arm != "lora" or device == "cpu":
        return {None: {}}
    graphs: dict[str, dict[str, Any]] = {"specialised": {}, "shared": SHARED_GRAPHS}
    chosen = list(graphs) if bench.lora_graphs == "both" else [bench.lora_graphs]
    return {f"{name} graphs": graphs[name] for name in chosen}


def adapter_args(kind: ArmKind, bench: BenchConfig) -> dict[str, Any]:
    """Engine arguments that the arm has beyond the shared ones."""
    if kind.adapters == "none":
        return {}
    ranks = bench.rank if isinstance(bench.rank, list) else [bench.rank]
    slots = (bench.lora_slots or bench.num_adapters) if kind.adapts_all_tokens else bench.gpu_slots
    slots = min(slots, bench.num_adapters)
    args: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": slots,
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= max(ranks)),
    }
    if not kind.plugin:
        # All adapters stay in host memory: files are read once, in the warm-up. The plugin's worker sizes its pool so.
        args["max_cpu_loras"] = max(bench.num_adapters, slots)
    return args


def environment(kind: ArmKind, device: Device, mode: str) -> dict[str, str | None]:
    """Environment of the arm's process on top of the caller's; None removes a variable."""
    made: dict[str, str | None] = {"PREFT_DISABLE": None if kind.plugin else "1"}
    if device == "cpu" and mode == "offline":
        # Without async scheduling, a process of its own does nothing for the engine core but import vLLM once more.
        made["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return made
