"""Did the schedules come to the places where mistakes are made? Counted from the engine, and asserted by the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine_patch.runners import v1

METRICS = {
    "preemptions": "vllm:num_preemptions",
    "cached_tokens": "vllm:prefix_cache_hits",
}


@dataclass
class Seen:
    """Over all engines of a run."""

    preemptions: int = 0
    cached_tokens: int = 0
    straddling_chunks: int = 0
    """Chunks with prompt and sampled tokens in them: of requests that came back after a preemption."""
    one_token_prompt_chunks: int = 0
    """One position of the prompt, in a step of its own."""
    mixed_steps: int = 0
    """Steps with adapted and with unadapted tokens."""

    @contextmanager
    def watch(self, llm: Any) -> Iterator[None]:
        """Count what `llm` does while the body runs."""
        counted = v1.adapted_counts

        def count(prefill_only: Any, num_prompt: Any, num_computed: Any, num_scheduled: Any) -> Any:
            adapted = counted(prefill_only, num_prompt, num_computed, num_scheduled)
            end = num_computed + num_scheduled
            self.straddling_chunks += int((prefill_only & (num_computed < num_prompt) & (end > num_prompt)).sum())
            self.one_token_prompt_chunks += int((prefill_only & (num_scheduled == 1) & (end <= num_prompt)).sum())
            self.mixed_steps += bool(0 < adapted.sum() < num_scheduled.sum())
            return adapted

        v1.adapted_counts = count  # type: ignore[attr-defined]
        try:
            yield
        finally:
            v1.adapted_counts = counted  # type: ignore[attr-defined]
            metrics = {metric.name: metric for metric in llm.get_metrics()}
            for field, name in METRICS.items():
                setattr(self, field, getattr(self, field) + metrics[name].value)
