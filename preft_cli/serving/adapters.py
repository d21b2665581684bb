"""Which adapters of a folder this server can answer for exactly, and why not the others."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine_patch.manifest import Listed
from engine_patch.pool.limits import with_room_ahead
from engine_patch.store.format import Header, layout_of
from engine_patch.store.layout import PAGE_BYTES
from preft_cli.errors import UserError
from preft_cli.serving.plan import ServePlan

if TYPE_CHECKING:
    from preft_cli.convert.collect import Collected
    from preft_cli.models import BaseModel

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The limits that vLLM's LoRA can be started with."""


class Served(NamedTuple):
    """What the server starts with."""

    adapters: dict[str, Listed]
    """By model name."""
    rejected: list[tuple[Path, str]]
    """What is left out, each with its reason."""
    max_lora_rank: int
    """The rank limit of the engine: the smallest of vLLM's that holds all of them."""
    gpu_pool: int | None
    """Bytes of device memory for adapters; None where nothing says how large adapters will be."""
    template_digest: str | None
    """Of the chat template that the server uses."""


def choose(collected: Collected, plan: ServePlan, template_digest: str | None) -> Served:
    """Take those that fit.

    Args:
        collected: the readable adapters of the folder that belong to the base model.
        plan: the limits that the config sets; where it sets none, the largest adapter in the folder does.
        template_digest: of the chat template that the server uses; None where there is none.
    """
    ranks = {name: header.rank for name, header in collected.headers.items()}
    wanted = plan.max_lora_rank or max(ranks.values(), default=16)
    limit = next((rank for rank in LORA_RANKS if rank >= wanted), LORA_RANKS[-1])
    sizes = {name: device_bytes(header, plan.itemsize) for name, header in collected.headers.items()}
    adapters: dict[str, Listed] = {}
    rejected = list(collected.rejected)
    for name, header in collected.headers.items():
        trained_with = header.meta.get("chat_template_digest")
        if ranks[name] > limit:
            reason = f"rank {ranks[name]}: this server holds up to {limit} (serve.max_lora_rank)"
        elif trained_with and trained_with != template_digest:
            reason = "trained with another chat template than this server uses; set model.chat_template to that one"
        elif too_large := _too_large(sizes[name], plan):
            reason = too_large
        else:
            adapters[name] = Listed(path=collected.adapters[name], method=header.method, digest=header.digest)
            continue
        rejected.append((collected.sources[name], reason))
    pool = plan.gpu_pool or default_pool([sizes[name] for name in adapters], plan.gpu_slots)
    return Served(adapters, rejected, limit, pool, template_digest)


def device_bytes(header: Header, itemsize: int) -> int:
    """What an adapter takes on the device, in elements of `itemsize` bytes; with tensor parallelism each worker takes less."""
    return layout_of(header.groups, itemsize).num_pages * PAGE_BYTES


def default_pool(sizes: list[int], slots: int) -> int | None:
    """Bytes for the largest adapters that one step can need, and for those of the next as far as there are more."""
    if not sizes:
        return None
    largest = heapq.nlargest(slots, sizes)
    step = sum(largest) + (slots - len(largest)) * largest[0]
    return max(step, min(with_room_ahead(step), sum(sizes)))


def _too_large(size: int, plan: ServePlan) -> str | None:
    if plan.tensor_parallel_size > 1:  # a worker keeps a part only, and says so itself
        return None
    for key, pool in (("gpu_pool", plan.gpu_pool), ("host_pool", plan.host_pool)):
        if pool and size > pool:
            return f"it takes {size / 1e6:.1f} MB, and serve.{key} has {pool / 1e6:.1f} MB"
    return None


def template_digest(base: BaseModel, file: Path | None) -> str | None:
    """Digest of the chat template that the server will use: `file`, else the tokenizer's own.

    Raises:
        UserError: `file` cannot be read.
    """
    from transformers import AutoTokenizer

    from preft_cli.data.template import load_template

    if not base.random:
        return load_template(AutoTokenizer.from_pretrained(base.path), base.path, file).digest
    if file:
        raise UserError("model.chat_template: random weights have no tokenizer to use it with", exit_code=2)
    return None
