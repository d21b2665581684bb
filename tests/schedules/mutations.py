"""Faults planted on purpose: each must make the schedules fail. Some are upstream's own, back by leaving our patch out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from engine_patch import prefix_cache, rule, scheduler
from engine_patch.kernels import cpu
from engine_patch.pool import device, host, share, streams
from engine_patch.runners import token_map, v1, v2


def _off_by_one() -> None:
    """The last token of the prompt is taken for a sampled one."""

    def num_adapted(num_prompt_tokens: Any, start: Any, count: Any) -> Any:
        return rule.num_adapted(num_prompt_tokens - 1, start, count)

    token_map.num_adapted = num_adapted  # type: ignore[attr-defined]
    prefix_cache.num_adapted = num_adapted  # type: ignore[attr-defined]


def _phase_by_step() -> None:
    """As the published fork decides: a request with several tokens in a step is in prefill, one with one token decodes."""

    def adapted_counts(prefill_only: Any, num_prompt: Any, num_computed: Any, num_scheduled: Any) -> Any:
        return np.where(prefill_only & (num_scheduled == 1), 0, num_scheduled)

    v1.adapted_counts = adapted_counts  # type: ignore[attr-defined]


def _name_keyed() -> None:
    """Blocks are keyed by the adapter's name alone."""
    prefix_cache.make_content_keys = lambda upstream: (
        lambda request: (  # type: ignore[attr-defined]
            [("lora", request.lora_request.lora_name)] if request.lora_request else []
        )
    )


def _no_phase() -> None:
    """Upstream's fault: a block with sampled tokens has the key of a block of prompt."""
    prefix_cache.phase_key = lambda num_prompt_tokens, start, end: None  # type: ignore[attr-defined]


def _stock_cache() -> None:
    """Upstream's prefix cache, untouched."""
    prefix_cache.make_content_keys = prefix_cache.make_block_keys = lambda upstream: upstream  # type: ignore[attr-defined]


def _base_takes_the_last_slot() -> None:
    """Upstream's fault on CPU: a token without an adapter gets the weights of the last slot."""
    upstream = cpu.find_segments

    def find_segments(runs: Any, places: Any) -> Any:
        return upstream(runs._replace(ids=np.where(runs.ids == 0, max(places, default=0), runs.ids)), places)

    cpu.find_segments = find_segments


def _stale_place() -> None:
    """An adapter that came to lie elsewhere on the device is looked for where it was first."""
    use, seen = device.DeviceTier.use, dict[str, Any]()

    def stale(self: Any, digests: list[str]) -> Any:
        places = use(self, digests)
        return [seen.setdefault(f"{id(self)} {digest}", place) for digest, place in zip(digests, places, strict=True)]

    device.DeviceTier.use = stale  # type: ignore[method-assign]


def _early() -> None:
    """A request is scheduled, and its adapter copied, before the file has been read."""
    host.HostTier.ready = lambda self, ref: ref.digest in self.adapters  # type: ignore[method-assign]
    load = share.Sharer.load

    def slow(self: Any, *arguments: Any) -> None:
        time.sleep(0.05)
        load(self, *arguments)

    share.Sharer.load = slow  # type: ignore[method-assign]


def _hidden_alone() -> None:
    """An intervention reads what the block adds to the residual stream, not the stream."""
    upstream = streams.ResidualStream.forward

    def forward(self: Any, hidden: Any, residual: Any) -> None:
        upstream(self, hidden, residual.new_zeros(residual.shape))

    streams.ResidualStream.forward = forward  # type: ignore[method-assign]


def _swap() -> None:
    """In one step of ten, two adapters have each other's places."""
    use, chance = device.DeviceTier.use, random.Random(0)

    def swapped(self: Any, digests: list[str]) -> list[Any]:
        places = use(self, digests)
        if len(places) > 1 and chance.random() < 0.1:
            places[:2] = reversed(places[:2])
        return places

    device.DeviceTier.use = swapped  # type: ignore[method-assign]


def _all_tokens() -> None:
    """A prefill-only adapter acts on decoded tokens too, and has a slot for that."""
    scheduler.rests = lambda request: False  # type: ignore[attr-defined]
    _count(lambda prefill_only, num_prompt, num_computed, num_scheduled: num_scheduled)


def _no_tokens() -> None:
    """A prefill-only adapter acts on nothing in requests with one number of prompt tokens of eight."""

    def adapted_counts(prefill_only: Any, num_prompt: Any, num_computed: Any, num_scheduled: Any) -> Any:
        right = token_map.adapted_counts(prefill_only, num_prompt, num_computed, num_scheduled)
        return np.where(prefill_only & (num_prompt % 8 == 0), 0, right)

    _count(adapted_counts)


def _count(adapted_counts: Callable[..., Any]) -> None:
    v1.adapted_counts = v2.adapted_counts = adapted_counts  # type: ignore[attr-defined]


MUTATIONS: dict[str, Callable[[], None]] = {
    "off-by-one": _off_by_one,
    "phase-by-step": _phase_by_step,
    "name-keyed": _name_keyed,
    "no-phase": _no_phase,
    "stock-cache": _stock_cache,
    "base-takes-the-last-slot": _base_takes_the_last_slot,
    "stale-place": _stale_place,
    "early": _early,
    "hidden-alone": _hidden_alone,
    "swap": _swap,
    "all-tokens": _all_tokens,
    "no-tokens": _no_tokens,
}
