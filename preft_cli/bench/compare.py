"""Arms compare only if they did the same work under the same limits with the same adapters."""

from __future__ import annotations

from preft_cli.bench.results import ArmResult
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
    "tensor_parallel_size",
)
"""Engine settings in which arms must agree, as resolved by the engine, or their numbers do not compare."""


def check_comparable(arms: dict[str, ArmResult]) -> None:
    """Refuse arms that did not do the same work under the same limits.

    Raises:
        UserError: names the arms and what differs.
    """
    first_name, first = next(iter(arms.items()))
    with_adapters = [(name, arm.adapters) for name, arm in arms.items() if arm.adapters is not None]
    for name, arm in arms.items():
        if arm.requests_digest != first.requests_digest:
            raise UserError(
                f"bench: arms {first_name} and {name} did not answer the same requests; nothing was written"
            )
        for key in SHARED_SETTINGS:
            if arm.engine.get(key) != first.engine.get(key):
                raise UserError(
                    f"bench: arms {first_name} and {name} do not compare: {key} is {first.engine.get(key)} and"
                    f" {arm.engine.get(key)}; nothing was written"
                )
    for name, adapters in with_adapters:
        if adapters.weights_digest != with_adapters[0][1].weights_digest:
            raise UserError(f"bench: arms {with_adapters[0][0]} and {name} have other adapters; nothing was written")
