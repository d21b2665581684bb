"""The mask that `preft data check` prints is the one that the engine applies to the same request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_patch.adapter import Adapter
from engine_patch.requests import lora_request
from preft_cli.config.schema import PreftConfig
from preft_cli.data.check import check

pytestmark = pytest.mark.engine

ANSWER = "At a hundred degrees Celsius, at the sea."
MESSAGES = [
    {"role": "system", "content": "You are a patient science teacher."},
    {"role": "user", "content": "At what temperature does water freeze? " * 12},
    {"role": "assistant", "content": "At zero."},
    {"role": "user", "content": "And boil?"},
    {"role": "assistant", "content": ANSWER},
]


def record(worker: Any) -> None:
    """In the worker's process: note for every step and request where it begins, its tokens, and how many are adapted."""
    from engine_patch.runners import v1

    upstream, steps = v1.adapted_counts, []

    def count(prefill_only: Any, num_prompt: Any, num_computed: Any, num_scheduled: Any) -> Any:
        adapted = upstream(prefill_only, num_prompt, num_computed, num_scheduled)
        steps.extend(zip(num_computed.tolist(), num_scheduled.tolist(), adapted.tolist(), strict=True))
        return adapted

    worker.seen = upstream, steps
    v1.adapted_counts = count


def recorded(worker: Any) -> list[tuple[int, int, int]]:
    """What was noted; nothing is from now on."""
    from engine_patch.runners import v1

    v1.adapted_counts, steps = worker.seen
    del worker.seen
    return list(steps)


@pytest.mark.parametrize(("name", "method"), [("one", "lorap"), ("both-one", "lorap+direftp"), ("everywhere", "lora")])
def test_the_mask_shown_is_the_one_that_the_engine_applies(
    llm: Any, adapters: dict[str, tuple[Path, Adapter]], tmp_path: Path, name: str, method: str
) -> None:
    """Over several chunks of the prompt and every step of the answer."""
    from vllm import SamplingParams

    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    config = PreftConfig.model_validate({"adapter": {"method": method}})
    shown = check(config, tmp_path, rows=0, row=2).row
    num_prompt = sum(not token.learnt for token in shown.tokens)
    answer = len(shown.tokens) - num_prompt
    sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    request = lora_request(name, adapters[name][0])

    llm.reset_prefix_cache()
    llm.collective_rpc(record)
    (output,) = llm.chat(MESSAGES[:-1], sampling, lora_request=request, use_tqdm=False)
    (steps,) = llm.collective_rpc(recorded)

    assert output.prompt_token_ids == [token.id for token in shown.tokens[:num_prompt]]
    applied: dict[int, bool] = {}
    for start, count, adapted in steps:
        applied |= {position: position < start + adapted for position in range(start, start + count)}
    assert len(steps) > answer, "the prompt was to come in several chunks"
    # The last token is sampled and never computed with.
    assert [applied[position] for position in sorted(applied)] == shown.mask[:-1]
