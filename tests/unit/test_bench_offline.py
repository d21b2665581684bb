"""The engine in the worker's process, with vLLM's class replaced: what is asked of it, and what is believed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patch.errors import PreftError
from preft_cli.bench.offline import COUNTED, OfflineEngine, difference
from preft_cli.bench.results import Counters
from preft_cli.bench.workload import Request

REQUESTS = [Request(id=f"r{i}", prompt_token_ids=[i, i], output_len=3 + i, adapter=1 - i) for i in range(2)]


class FakeLLM:
    """Notes what happens, counts ten more of everything with each call of `generate`."""

    def __init__(self, *, resets: bool = True, missing: str = "") -> None:
        self.happened: list[str] = []
        self.resets, self.missing, self.count = resets, missing, 0
        self.asked: list[tuple[list[int], Any, Any]] = []

    def reset_prefix_cache(self) -> bool:
        self.happened.append("reset")
        return self.resets

    def generate(self, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool, lora_request: Any) -> list[Any]:
        self.happened.append("generate")
        self.count += 10
        requests = lora_request or [None] * len(prompts)
        self.asked = [
            (one["prompt_token_ids"], p, lora) for one, p, lora in zip(prompts, params, requests, strict=True)
        ]
        answers = [SimpleNamespace(token_ids=[0] * p.max_tokens, finish_reason="length") for p in params]
        return [SimpleNamespace(outputs=[answer]) for answer in answers]

    def get_metrics(self) -> list[Any]:
        # Two processes, each with its own part.
        halves = [SimpleNamespace(name=name, value=self.count / 2) for name in COUNTED.values() if name != self.missing]
        return [*halves, *halves, SimpleNamespace(name="vllm:other", value=7)]


def engine(llm: FakeLLM, adapters: list[str] | None = None) -> OfflineEngine:
    made = OfflineEngine.__new__(OfflineEngine)
    made._llm, made._plugin, made._adapters = llm, False, adapters or []
    return made


def test_each_set_of_requests_finds_an_empty_prefix_cache() -> None:
    llm = FakeLLM()
    for _ in range(2):
        engine(llm).answer(REQUESTS)
    assert llm.happened == ["reset", "generate", "reset", "generate"]


def test_a_prefix_cache_that_cannot_be_emptied_is_an_error() -> None:
    with pytest.raises(PreftError, match="prefix cache"):
        engine(FakeLLM(resets=False)).answer(REQUESTS)


def test_requests_get_their_prompt_length_and_adapter() -> None:
    llm = FakeLLM()
    answered = engine(llm, ["first", "second"]).answer(REQUESTS)
    assert [(ids, p.max_tokens, p.ignore_eos, p.temperature, lora) for ids, p, lora in llm.asked] == [
        ([0, 0], 3, True, 0.0, "second"),
        ([1, 1], 4, True, 0.0, "first"),
    ]
    assert [one.num_tokens for one in answered.answers] == [3, 4]


def test_counters_are_of_one_set_of_requests_over_all_processes() -> None:
    llm = FakeLLM()
    made = engine(llm)
    made.answer(REQUESTS)
    assert made.answer(REQUESTS).counters == Counters(
        preemptions=10, prompt_tokens=10, prefix_cache_queries=10, prefix_cache_hits=10, adapter_loads=None
    )


def test_a_counter_that_is_missing_is_not_taken_for_zero() -> None:
    with pytest.raises(PreftError, match="num_preemptions"):
        engine(FakeLLM(missing="vllm:num_preemptions")).answer(REQUESTS)


def test_loads_are_counted_by_tier() -> None:
    counted = {"preemptions": 0, "prompt_tokens": 0, "prefix_cache_queries": 0, "prefix_cache_hits": 0}
    before = Counters(**counted, adapter_loads={"device": 5, "host": 2})
    after = Counters(**counted, adapter_loads={"device": 9, "host": 2})
    assert difference(before, after).adapter_loads == {"device": 4, "host": 0}
