"""Many more adapters than slots decode at once, and each is answered as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.adapter import Adapter
from engine_patch.requests import lora_request
from engine_patch.store.file import write_adapter
from preft_cli.models.modules import modules_of
from tests.reference import MaskedReference, random_adapter
from tests.schedules.models import tiny_llama

pytestmark = pytest.mark.engine

COUNT, SLOTS, NEW_TOKENS = 64, 2, 80
METHODS = ("lorap", "direftp", "lorap+direftp")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, MaskedReference, list[tuple[Path, Adapter]]]]:
    """An engine with two slots for a tiny model, its reference, and 64 adapters."""
    from vllm import LLM

    folder = tmp_path_factory.mktemp("many")
    base = tiny_llama(folder / "tiny")
    modules = modules_of(base)
    adapters = [
        random_adapter(modules, base.fingerprint, seed=index, loud=2, method=METHODS[index % len(METHODS)])
        for index in range(COUNT)
    ]
    files = [folder / f"{index}.preft" for index in range(COUNT)]
    for file, adapter in zip(files, adapters, strict=True):
        write_adapter(file, adapter)
    llm = LLM(
        str(base.path),
        dtype="float32",
        enable_lora=True,
        max_loras=SLOTS,
        max_lora_rank=8,
        max_model_len=128,
        max_num_seqs=COUNT,
        max_num_batched_tokens=128,
        block_size=32,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    yield llm, MaskedReference(base.path), list(zip(files, adapters, strict=True))
    llm.llm_engine.engine_core.shutdown()


def test_64_adapters_decode_at_once_with_two_slots(made: Any) -> None:
    from vllm import SamplingParams

    llm, reference, adapters = made
    rng = random.Random(0)
    prompts = [[rng.randrange(512) for _ in range(rng.randint(1, 40))] for _ in adapters]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    requests = [lora_request(f"a{index}", file) for index, (file, _) in enumerate(adapters)]

    def logprobs(sample: Any) -> torch.Tensor:
        return torch.tensor(
            [step[token].logprob for step, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        )

    answers: dict[int, Any] = {}
    at_once = 0
    for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling, lora_request=request)
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        at_once = max(at_once, len(outputs))
        answers |= {int(out.request_id): out.outputs[0] for out in outputs}
    assert at_once == COUNT  # answers of one step

    llm.reset_prefix_cache()
    for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        together, adapter = answers[index], adapters[index][1]
        expected = reference.logprobs(prompt, list(together.token_ids), adapter)
        assert (logprobs(together) - expected).abs().max() < 1e-3
        if index % 7 == 0:
            alone = llm.generate({"prompt_token_ids": prompt}, sampling, lora_request=request, use_tqdm=False)[
                0
            ].outputs[0]
            assert alone.token_ids == together.token_ids
            assert (logprobs(alone) - logprobs(together)).abs().max() < 1e-3
