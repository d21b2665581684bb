"""Fit the plan to the machine: the KV cache, the slots of arms that adapt all tokens, and which engines live side by side."""

from __future__ import annotations

import os

from pydantic import BaseModel as Record
from pydantic import ConfigDict

from preft_cli.bench.arms import ARMS
from preft_cli.bench.footprint import Footprint, ModelSizes, footprint, kv_cache_bytes, slot_bytes
from preft_cli.bench.machine import free_gpu_memory, free_memory
from preft_cli.bench.plan import ArmPlan, BenchPlan
from preft_cli.bench.schedule import Block, make_blocks, turn_notes
from preft_cli.bench.workload import Workload
from preft_cli.errors import UserError
from preft_cli.models import BaseModel

KV_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""Set by a user, it wins over the size that is worked out."""

NO_SHARE = 0.01
"""`gpu_memory_utilization` of every engine: with a KV cache of a given size, vLLM only checks that this much is free."""


class FittedPlan(Record):
    """A plan for this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: BenchPlan
    blocks: list[Block]
    footprints: dict[str, Footprint]
    """Estimated bytes on one device, by engine."""
    notes: list[str]


def fit(plan: BenchPlan, base: BaseModel, workload: Workload) -> FittedPlan:
    """The plan with sizes filled in.

    The KV cache is the same in all arms, and holds the longest requests that can run at once if memory allows it.

    Raises:
        UserError: an arm that does not fit into memory.
    """
    sizes = ModelSizes.of(base, plan)
    longest = sum(workload.longest)
    workers: int = plan.arms[0].engine_args["tensor_parallel_size"]
    free = free_memory() if plan.device == "cpu" else free_gpu_memory(workers)
    room = int(free * plan.gpu_memory_utilization)
    seqs = min(plan.max_num_seqs, plan.num_requests)
    wanted = kv_cache_bytes(sizes, seqs, longest, workers)
    kv_cache = min(wanted, largest_kv_cache(plan, sizes, room))
    arms = [fit_slots(arm, plan, sizes, kv_cache, room) for arm in plan.arms]
    found = {"model": str(base.path), "max_model_len": longest}
    if ours := not (plan.device == "cpu" and os.environ.get(KV_CACHE_VARIABLE)):
        found |= {"kv_cache_memory_bytes": kv_cache, "gpu_memory_utilization": NO_SHARE}
    fitted = plan.model_copy(update={"arms": [arm.with_args(**found) for arm in arms]})
    footprints = {arm.name: footprint(arm, plan, sizes, kv_cache) for arm in fitted.arms}
    blocks = make_blocks(
        {name: taken.total for name, taken in footprints.items()}, room, plan.max_engines, plan.repeats
    )
    cached = (
        f"KV cache of {kv_cache / 1e9:.2f} GB in every arm" if ours else f"KV cache in every arm by {KV_CACHE_VARIABLE}"
    )
    if ours and kv_cache < wanted:
        cached += f": memory has no room for all of {seqs} requests that may run at once, {wanted / 1e9:.2f} GB"
    notes = [cached, *slot_notes(plan, fitted), *turn_notes(blocks)]
    return FittedPlan(plan=fitted, blocks=blocks, footprints=footprints, notes=notes)


def slot_notes(plan: BenchPlan, fitted: BenchPlan) -> list[str]:
    """Where memory gave an arm fewer slots than were wished for."""
    return [
        f"{after.name}: {slots} slots for {plan.num_adapters} adapters; more do not fit into memory"
        for before, after in zip(plan.arms, fitted.arms, strict=True)
        if (slots := after.engine_args.get("max_loras")) != before.engine_args.get("max_loras")
    ]


def largest_kv_cache(plan: BenchPlan, sizes: ModelSizes, room: int) -> int:
    """Bytes that the hungriest arm leaves for the KV cache, its slots at their fewest.

    Raises:
        UserError: an arm leaves none.
    """
    left = {}
    for arm in plan.arms:
        alone = footprint(fewest_slots(arm, plan), plan, sizes, 0).total
        if room <= alone:
            raise UserError(
                f"bench arm {arm.name} takes at least {alone / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free"
                " (serve.gpu_memory_utilization of what nothing else holds). Free some, or lower bench.rank,"
                " bench.gpu_slots or bench.lora_slots, or raise serve.tensor_parallel_size."
            )
        left[arm.name] = room - alone
    return min(left.values())


def fewest_slots(arm: ArmPlan, plan: BenchPlan) -> ArmPlan:
    """The arm with one slot, if its slots are ours to choose."""
    ours = ARMS[arm.arm].adapts_all_tokens and plan.fit_lora_slots
    return arm.with_args(max_loras=1) if ours else arm


def fit_slots(arm: ArmPlan, plan: BenchPlan, sizes: ModelSizes, kv_cache: int, room: int) -> ArmPlan:
    """As many slots as memory has room for beside the KV cache, where they are ours to choose."""
    fewest = fewest_slots(arm, plan)
    if fewest is arm:
        return arm
    workers: int = arm.engine_args["tensor_parallel_size"]
    left = room - footprint(fewest, plan, sizes, kv_cache).total
    slots = 1 + max(0, left) // max(1, slot_bytes(arm, sizes) // workers)
    return arm.with_args(max_loras=min(arm.engine_args["max_loras"], slots))
