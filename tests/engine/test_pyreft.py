"""A pyreft adapter, converted and served, answers as pyreft itself does: the same tokens, the same log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.requests import lora_request
from preft_cli.adapters.pyreft.told import Positions, Told
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.run import convert
from tests import pyreft_fixture as fixture

pytestmark = pytest.mark.engine

POSITIONS: tuple[Positions, ...] = ("prompt", "all")
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    """Prompts come in chunks of up to 32 tokens; the longest has 64."""
    from vllm import LLM

    engine = LLM(
        str(fixture.BASE.path),
        dtype="float32",
        enable_lora=True,
        max_loras=4,
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


def to_requests(out: Path) -> dict[tuple[str, Positions], Any]:
    """A converted adapter for each kind of intervention and positions."""
    config = PreftConfig.model_validate({"model": {"base": fixture.BASE.name}})
    requests = {}
    for kind, where in product(fixture.EXPECTED, POSITIONS):
        name = f"{kind}-{where}"
        (item,) = convert([fixture.FOLDER / kind], config, out, told=Told(where), name=name).converted
        requests[kind, where] = lora_request(name, Path(item.path))
    return requests


def test_served_log_probabilities_are_pyrefts_own(llm: Any, tmp_path: Path) -> None:
    """Both kinds of interventions, on the prompt alone and on all tokens, in one batch."""
    from vllm import SamplingParams

    requests = to_requests(tmp_path)
    # The adapter changes from each request to the next, so that every step mixes them.
    asked = [(index, both) for index in range(len(fixture.EXPECTED["direft"])) for both in requests]
    outputs = llm.generate(
        [{"prompt_token_ids": fixture.EXPECTED[kind][index]["prompt_ids"]} for index, (kind, _) in asked],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False),
        lora_request=[requests[both] for _, both in asked],
        use_tqdm=False,
    )
    gaps: dict[tuple[str, Positions], float] = dict.fromkeys(requests, 0.0)
    for (index, (kind, where)), output in zip(asked, outputs, strict=True):
        expected, (answer,) = fixture.EXPECTED[kind][index][where], output.outputs
        assert list(answer.token_ids) == expected["completion_ids"], (kind, where, index)
        found = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        gap = (torch.tensor(found) - torch.tensor(expected["logprobs"])).abs().max().item()
        gaps[kind, where] = max(gaps[kind, where], gap)
    for (kind, where), gap in gaps.items():
        print(f"{kind}, {where}: largest difference {gap:.1e}")
    assert max(gaps.values()) < 1e-3
