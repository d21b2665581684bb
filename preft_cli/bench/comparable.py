"""Arms compare only if they did the same work under the same limits with the same adapters."""

from __future__ import annotations

from engine_patch.rule import parts
from preft_cli.bench.arms import ARMS
from preft_cli.bench.results import ArmResult, Started
from preft_cli.errors import UserError

SHARED_SETTINGS = (
    "device",
    "dtype",
    "enforce_eager",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "async_scheduling",
    "enable_prefix_caching",
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "tensor_parallel_size",
)
"""Engine settings in which arms must agree, as resolved by the engine, or their numbers do not compare."""


def check_comparable(arms: dict[str, ArmResult]) -> None:
    """Refuse arms that did not do the same work under the same limits.

    Raises:
        UserError: names the arms and what differs.
    """
    first_name, first = next(iter(arms.items()))
    for name, arm in arms.items():
        for started in arm.started:
            if started.requests_digest != first.started[0].requests_digest:
                raise UserError(
                    f"bench: arms {first_name} and {name} did not answer the same requests; nothing was written"
                )
            check_settings(first_name, first.started[0], name, started)
    check_adapters(arms)


def check_settings(first_name: str, first: Started, name: str, started: Started) -> None:
    """Refuse engines that resolved a shared setting differently."""
    for key in SHARED_SETTINGS:
        if started.engine.get(key) != first.engine.get(key):
            raise UserError(
                f"bench: arms {first_name} and {name} do not compare: {key} is {first.engine.get(key)} and"
                f" {started.engine.get(key)}; nothing was written"
            )


def check_adapters(arms: dict[str, ArmResult]) -> None:
    """Refuse arms of one kind of adapter with other weights: `lora` and `lorap` differ in how they serve, and in no more."""
    seen: dict[frozenset[str], tuple[str, str]] = {}
    for name, arm in arms.items():
        if arm.adapters is not None:
            kind = frozenset(parts(ARMS[arm.arm].method or ""))
            other, digest = seen.setdefault(kind, (name, arm.adapters.weights_digest))
            if digest != arm.adapters.weights_digest:
                raise UserError(f"bench: arms {other} and {name} have other adapters; nothing was written")
