"""The arms of a benchmark: what each adds to the engine that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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


ARMS: dict[str, ArmKind] = {
    BASE: ArmKind("stock engine, no adapters", "none", None, plugin=False),
    "lora": ArmKind("stock engine, its own multi-LoRA, all tokens adapted", "peft", "lora", plugin=False),
    "lorap": ArmKind("preft, LoRA on prompt tokens", "preft", "lorap", plugin=True),
    "direftp": ArmKind("preft, DiReFT on prompt tokens", "preft", "direftp", plugin=True),
}


def ordered(arms: list[str]) -> list[str]:
    """The arms to run, in order: as asked for, with `base` first where it was left out.

    Raises:
        UserError: for an arm named twice, or one that does not exist.
    """
    for arm in arms:
        if arm not in ARMS:
            raise UserError(f"bench.arms: there is no arm {arm!r}; known: {', '.join(ARMS)}", exit_code=2)
    if len(set(arms)) != len(arms):
        raise UserError(f"bench.arms: an arm is named twice in {', '.join(arms)}; name each once", exit_code=2)
    return arms if BASE in arms else [BASE, *arms]


def adapter_args(kind: ArmKind, bench: BenchConfig) -> dict[str, Any]:
    """Engine arguments that the arm has beyond the shared ones."""
    if kind.adapters == "none":
        return {}
    slots = min(bench.gpu_slots, bench.num_adapters)
    args: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": slots,
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= bench.rank),
    }
    if not kind.plugin:
        # All adapters stay in host memory: files are read once, in the warm-up. The plugin's worker sizes its pool so.
        args["max_cpu_loras"] = max(bench.num_adapters, slots)
    return args


def environment(kind: ArmKind) -> dict[str, str | None]:
    """Environment of the arm's process on top of the caller's; None removes a variable."""
    return {"PREFT_DISABLE": None if kind.plugin else "1"}
