"""A pyreft adapter, converted and served, answers as pyreft itself does: the same tokens, the same log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.requests import lora_request
from preft_cli.adapters.pyreft.told import Told
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.run import convert
from tests import pyreft_fixture as fixture

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    """Prompts come in chunks of up to 32 tokens; the longest has 60."""
    from vllm import LLM

    engine = LLM(
        str(fixture.BASE.path),
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=32,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    yield engine
    engine.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("kind", ["direft", "nodireft"])
def test_served_log_probabilities_are_pyrefts_own(llm: Any, tmp_path: Path, kind: str) -> None:
    from vllm import SamplingParams

    config = PreftConfig.model_validate({"model": {"base": fixture.BASE.name}})
    (item,) = convert([fixture.FOLDER / kind], config, tmp_path, told=Told("prompt")).converted
    cases = fixture.EXPECTED[kind]
    outputs = llm.generate(
        [{"prompt_token_ids": case["prompt_ids"]} for case in cases],
        SamplingParams(
            temperature=0, max_tokens=len(cases[0]["completion_ids"]), ignore_eos=True, logprobs=0, detokenize=False
        ),
        lora_request=lora_request(kind, Path(item.path)),
        use_tqdm=False,
    )
    for case, output in zip(cases, outputs, strict=True):
        (answer,) = output.outputs
        assert list(answer.token_ids) == case["completion_ids"]
        found = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        gap = (torch.tensor(found) - torch.tensor(case["prompt"])).abs().max().item()
        print(f"{kind}, {len(case['prompt_ids'])} prompt tokens: largest difference {gap:.1e}")
        assert gap < 1e-3
