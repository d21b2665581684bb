"""Which KV blocks two requests share, in vLLM's own scheduler and prefix cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_patch import prefix_cache, scheduler
from engine_patch.prefix_cache import phase_key
from tests.unit.scheduling import BLOCK, Scheduling, adapter

PROMPT = list(range(100, 100 + 3 * BLOCK))


@pytest.fixture
def patched(upstream: None) -> None:
    prefix_cache.patch()
    scheduler.patch()


def cached(scheduler_model: Path, first: Any, second: Any, prompt: list[int] = PROMPT) -> int:
    """Tokens of `prompt` that the second adapter's request takes from what the first one's has computed."""
    scheduling = Scheduling(scheduler_model)
    scheduling.add(prompt, first, max_tokens=1)
    while scheduling.scheduler.has_unfinished_requests():
        scheduling.step()
    request = scheduling.add(prompt, second)
    return len(prompt) - scheduling.step()[request.request_id]


A, B = adapter("a"), adapter("b")


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (None, None, True),
        (A, A, True),
        (A, adapter("a", name="another name"), True),
        (A, None, False),
        (None, A, False),
        (A, B, False),
        (A, adapter("b", name="a"), False),  # new weights under the old name
        (A, adapter("a", "lora"), False),  # the same weights on all tokens
    ],
)
def test_blocks_are_shared_by_content_alone(
    scheduler_model: Path, patched: None, first: Any, second: Any, shared: bool
) -> None:
    # The last token is always computed.
    assert cached(scheduler_model, first, second) == (2 * BLOCK if shared else 0)


@pytest.mark.parametrize("n", [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 7])
@pytest.mark.parametrize(("method", "shares_answer"), [("lorap", False), ("lora", True)])
def test_a_block_with_sampled_tokens_serves_no_later_prompt(
    scheduler_model: Path, patched: None, n: int, method: str, shares_answer: bool
) -> None:
    """Turn two of a chat: prompt and answer of turn one are its prompt."""
    scheduling, used = Scheduling(scheduler_model), adapter("a", method)
    first = scheduling.add(PROMPT[:n], used, max_tokens=3 * BLOCK)
    while scheduling.scheduler.has_unfinished_requests():
        scheduling.step()
    second = scheduling.add([*first.all_token_ids, 1], used)
    num_cached = second.num_tokens - scheduling.step()[second.request_id]
    computed = n + 3 * BLOCK - 1  # of the last token no KV exists
    assert num_cached == (computed if shares_answer else n) // BLOCK * BLOCK


def test_upstream_would_serve_it(scheduler_model: Path, upstream: None) -> None:
    """The fault that the patch is for."""
    scheduling, used = Scheduling(scheduler_model), adapter("a")
    first = scheduling.add(PROMPT[: BLOCK + 7], used, max_tokens=3 * BLOCK)
    while scheduling.scheduler.has_unfinished_requests():
        scheduling.step()
    second = scheduling.add([*first.all_token_ids, 1], used)
    assert second.num_tokens - scheduling.step()[second.request_id] > BLOCK


def test_a_preempted_request_finds_its_own_blocks_again(scheduler_model: Path, patched: None) -> None:
    """With sampled tokens in them: for this request they are what it would compute."""
    scheduling = Scheduling(scheduler_model)
    request = scheduling.add(PROMPT[: BLOCK + 7], adapter("a"), max_tokens=3 * BLOCK)
    for _ in range(2 * BLOCK):
        scheduling.step()
    scheduling.scheduler.running.remove(request)
    scheduling.scheduler._preempt_request(request, 0.0)
    assert request.num_computed_tokens == 0
    assert scheduling.step()[request.request_id] <= BLOCK  # the rest of 55 tokens comes from the cache


@pytest.mark.parametrize(
    ("n", "start", "end", "key"),
    [
        (32, 0, 32, None),
        (33, 0, 32, None),
        (31, 0, 32, ("preft_adapted", 31)),
        (32, 32, 64, ("preft_adapted", 0)),
        (1, 0, 32, ("preft_adapted", 1)),
        (5, 32, 64, ("preft_adapted", 0)),
    ],
)
def test_the_phase_of_a_block(n: int, start: int, end: int, key: Any) -> None:
    assert phase_key(n, start, end) == key


def test_published_keys_tell_contents_apart(upstream: None) -> None:
    """vLLM's KV events carry the second item of every key, for routers that compare them."""
    from vllm.v1.core import kv_cache_utils

    prefix_cache.patch()
    published = []
    for lora_request in (A, B, adapter("a", "lora")):
        request = SimpleNamespace(
            lora_request=lora_request, num_prompt_tokens=20, mm_features=[], cache_salt=None, prompt_embeds=None
        )
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 16, 32, 0)
        published.append(kv_cache_utils.to_event_extra_keys([keys]))
    assert published == [[("lorap:a", 4)], [("lorap:b", 4)], [("lora:a",)]]


def test_all_events_of_a_request_carry_its_adapter(scheduler_model: Path, patched: None) -> None:
    """Also those of blocks that fill up while it holds no slot."""
    used = adapter("a")
    scheduling = Scheduling(scheduler_model, kv_events=True)
    scheduling.add(PROMPT[: BLOCK + 7], used, max_tokens=3 * BLOCK)
    while scheduling.scheduler.has_unfinished_requests():
        scheduling.step()
    stored = [(event.lora_id, event.lora_name) for event in scheduling.events if type(event).__name__ == "BlockStored"]
    assert len(stored) >= 4
    assert set(stored) == {(used.lora_int_id, "a")}
