"""Served log-probabilities against the masked reference, token by token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.adapter import Adapter
from engine_patch.requests import lora_request
from tests.reference import MaskedReference

pytestmark = pytest.mark.engine

LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 50, 63, 64, 65, 100, 128, 150, 200, 300]
NEW_TOKENS = 32
TOLERANCE = 1e-3  # float32 on both sides; a wrong mask differs by whole units


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(100, 40_000) for _ in range(length)] for length in LENGTHS]


def generate(llm: Any, prompts: list[list[int]], requests: list[Any]) -> list[Any]:
    """Greedy answers with the log-probability of every token."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [out.outputs[0] for out in llm.generate(inputs, sampling, lora_request=requests, use_tqdm=False)]


def served_logprobs(answer: Any) -> torch.Tensor:
    return torch.tensor([step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)])


@pytest.mark.parametrize("kind", ["", "stream-", "both-"])
def test_prefill_only_all_token_and_base_in_one_batch_equal_the_reference(
    llm: Any, adapters: dict[str, tuple[Path, Adapter]], reference: MaskedReference, kind: str
) -> None:
    """20 prompts, three prefill-only adapters of a kind, one on all tokens and the base model, mixed in every step.

    Prompts are cut into chunks and requests preempted on the way (see the engine's fixture).
    """
    prompts = make_prompts()
    names = [[f"{kind}one", f"{kind}two", f"{kind}few", f"{kind}everywhere", None][i % 5] for i in range(len(prompts))]
    requests = [lora_request(name, adapters[name][0]) if name else None for name in names]
    answers = generate(llm, prompts, requests)
    assert next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions") > 0
    for prompt, name, answer in zip(prompts, names, answers, strict=True):
        adapter = adapters[name][1] if name else None
        everywhere = len(prompt) + NEW_TOKENS if name == f"{kind}everywhere" else None
        expected = reference.logprobs(prompt, list(answer.token_ids), adapter, adapted=everywhere)
        gap = (served_logprobs(answer) - expected).abs().max().item()
        assert gap < TOLERANCE, f"{name or 'base'}, {len(prompt)} prompt tokens: log-probabilities differ by {gap}"


@pytest.mark.parametrize("name", ["one", "stream-one", "both-one"])
def test_prefill_only_differs_from_the_same_weights_on_all_tokens(
    llm: Any, adapters: dict[str, tuple[Path, Adapter]], reference: MaskedReference, name: str
) -> None:
    path, adapter = adapters[name]
    prompts = [prompt for prompt in make_prompts() if len(prompt) in (1, 2, 17, 33, 64, 100)]
    gaps = []
    for prompt, answer in zip(prompts, generate(llm, prompts, [lora_request(name, path)] * len(prompts)), strict=True):
        served, tokens = served_logprobs(answer), list(answer.token_ids)
        right = reference.logprobs(prompt, tokens, adapter)
        all_tokens = reference.logprobs(prompt, tokens, adapter, adapted=len(prompt) + len(tokens))
        off_by_one = reference.logprobs(prompt, tokens, adapter, adapted=len(prompt) - 1)
        assert (served - right).abs().max() < TOLERANCE
        # The first token comes from prompt positions alone, where both agree.
        gaps.append(min((served - wrong)[1:].abs().max().item() for wrong in (all_tokens, off_by_one)))
    assert min(gaps) > 100 * TOLERANCE
