"""Arms compare only if they did the same work under the same limits with the same adapters."""

from __future__ import annotations

from collections.abc import Mapping

from engine_patch.rule import parts
from preft_cli.bench.arms import ARMS
from preft_cli.bench.results import AdapterSet, Started
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
    "num_gpu_blocks",
    "seed",
    "tensor_parallel_size",
)
"""Engine settings in which arms must agree, as resolved by the engine, or their numbers do not compare."""


def check_settings(first_name: str, first: Started, name: str, started: Started) -> None:
    """Refuse an engine that got other requests than the first one, or resolved a shared setting differently.

    Called as soon as it is up: nothing was measured for nothing.

    Raises:
        UserError: names the engines and what differs.
    """
    if started.requests_digest != first.requests_digest:
        raise UserError(f"bench: arms {first_name} and {name} did not get the same requests; nothing was written")
    for key in SHARED_SETTINGS:
        if key not in started.engine or started.engine[key] != first.engine[key]:
            raise UserError(
                f"bench: arms {first_name} and {name} do not compare: {key} is {first.engine.get(key, 'not known')} and"
                f" {started.engine.get(key, 'not known')}; nothing was written"
            )


def check_adapters(adapters: Mapping[str, AdapterSet | None]) -> None:
    """Refuse arms of one kind of adapter with other weights: `lora` and `lorap` differ in how they serve, and in no more.

    Args:
        adapters: of each arm; None for an arm without.

    Raises:
        UserError: names two arms whose adapters differ.
    """
    seen: dict[frozenset[str], tuple[str, str]] = {}
    for name, described in adapters.items():
        if described is not None:
            kind = frozenset(parts(ARMS[name].method or ""))
            other, digest = seen.setdefault(kind, (name, described.weights_digest))
            if digest != described.weights_digest:
                raise UserError(f"bench: arms {other} and {name} have other adapters; nothing was written")
