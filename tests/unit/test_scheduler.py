"""Adapter slots and the wait for them, in vLLM's own scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from engine_patch import scheduler
from tests.unit.scheduling import Scheduling, adapter


@pytest.fixture
def patched(upstream: None) -> None:
    scheduler.patch()


def decode_together(scheduling: Scheduling, count: int, method: str = "lorap") -> int:
    """The most requests that one step computes, of `count` with an adapter each."""
    for index in range(count):
        scheduling.add([1, 2, 3, index], adapter(f"{method}{index}", method), max_tokens=count)
    return max(len(scheduling.step()) for _ in range(count))


def test_64_adapters_decode_at_once_with_two_slots(scheduler_model: Path, patched: None) -> None:
    assert decode_together(Scheduling(scheduler_model, slots=2), 64) == 64


def test_upstream_decodes_no_more_than_it_has_slots(scheduler_model: Path, upstream: None) -> None:
    """The fault that the patch is for; an all-token adapter still needs its slot to the end."""
    assert decode_together(Scheduling(scheduler_model, slots=2), 64) == 2
    scheduler.patch()
    assert decode_together(Scheduling(scheduler_model, slots=2), 64, "lora") == 2


def test_never_more_adapters_compute_prompts_than_there_are_slots(scheduler_model: Path, patched: None) -> None:
    scheduling = Scheduling(
        scheduler_model, slots=2, budget=64
    )  # the second prompt of a step is cut, and has a rest in the next
    requests = {r.request_id: r for r in (scheduling.add([1] * 40, adapter(f"long{i}")) for i in range(6))}
    while scheduling.scheduler.has_unfinished_requests():
        before = {id_: request.num_computed_tokens for id_, request in requests.items()}
        computing = {
            requests[id_].lora_request.adapter_id
            for id_ in scheduling.step()
            if before[id_] < requests[id_].num_prompt_tokens
        }
        assert len(computing) <= 2
    assert all(request.num_output_tokens == 8 for request in requests.values())
    assert not scheduling.scheduler.preft_acting.adapters()


def test_a_preempted_request_counts_again(scheduler_model: Path, patched: None) -> None:
    """While it computes its prompt anew, nobody else gets the one slot; while it decodes, somebody does."""
    scheduling = Scheduling(scheduler_model, slots=1, budget=64)
    request = scheduling.add([1] * 100, adapter("first"), max_tokens=60)
    while request.num_output_tokens < 10:
        scheduling.step()
    scheduling.scheduler.running.remove(request)
    scheduling.scheduler._preempt_request(request, 0.0)
    scheduling.scheduler.reset_prefix_cache()
    scheduling.step()
    other = scheduling.add([2] * 10, adapter("other"), max_tokens=4)
    while request.num_computed_tokens < request.num_prompt_tokens:
        assert other.request_id not in scheduling.step()
    while scheduling.scheduler.has_unfinished_requests():
        scheduling.step()
    assert (request.num_preemptions, request.num_output_tokens, other.num_output_tokens) == (1, 60, 4)


def unlike(number: int) -> list[int]:
    """90 tokens that begin like no other's: a prompt of more than a step, with nothing of it cached."""
    return [3 + number // 50, 3 + number % 50, *[1] * 88]


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("steps", [1, 4], ids=["in its prompt", "decoding"])
def test_a_preempted_request_takes_no_slot_until_it_comes_back(
    scheduler_model: Path, patched: None, steps: int, v2: bool
) -> None:
    """The V1 runner is told of it in another place than the V2 runner."""
    scheduling = Scheduling(scheduler_model, slots=1)
    scheduler = scheduling.scheduler
    scheduler.use_v2_model_runner = v2
    request = scheduling.add([1] * 100, adapter("long"))
    for _ in range(steps):
        scheduling.step()
    original = request.lora_request.adapter if steps == 4 else request.lora_request
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.lora_request is original
    scheduler.preft_acting.let_rest()
    assert not scheduler.preft_acting.adapters()
    scheduling.step()
    assert scheduler.preft_acting.adapters() == {original.lora_int_id}
    while scheduler.has_unfinished_requests():
        scheduling.step()
    assert request.num_output_tokens == 8


def test_a_request_under_the_id_of_one_that_was_aborted_is_another(scheduler_model: Path, patched: None) -> None:
    from vllm.v1.request import RequestStatus

    scheduling = Scheduling(scheduler_model, slots=1)
    first, second = (scheduling.add([1] * 100, adapter(name)) for name in "ab")
    scheduling.step()
    acting = scheduling.scheduler.preft_acting
    assert list(acting.requests.values()) == [first]
    scheduling.scheduler.finish_requests(first.request_id, RequestStatus.FINISHED_ABORTED)
    first.status = RequestStatus.RUNNING  # so only what the scheduler knows under the id tells
    scheduling.scheduler.requests[first.request_id] = second
    acting.let_rest()
    assert not acting.requests


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("method", ["lorap", "lora"])
def test_a_request_whose_adapter_is_not_resident_waits_a_bounded_number_of_steps(
    scheduler_model: Path, patched: None, policy: str, method: str
) -> None:
    """Others keep coming whose adapter is resident, and would go past it for ever."""
    scheduling = Scheduling(scheduler_model, slots=1, policy=policy)
    popular = adapter("popular", method)
    scheduling.add([1] * 90, popular, max_tokens=12)
    scheduling.step()
    rare = scheduling.add([2] * 10, adapter("rare", method))
    for steps in range(200):
        scheduling.add(unlike(steps), popular, max_tokens=12)  # the slot never runs dry by itself
        scheduling.step()
        if rare.num_computed_tokens:
            break
    # Passed so often, then the ones before it end: two prompts of two steps, and with all-token adapters 12 tokens.
    assert scheduler.MAX_STEPS_PASSED <= steps <= scheduler.MAX_STEPS_PASSED + 30
    for _ in range(400):
        scheduling.step()
    assert not scheduling.scheduler.has_unfinished_requests()  # those that were hidden came back


def test_upstream_lets_it_wait_for_ever(scheduler_model: Path, upstream: None) -> None:
    scheduling = Scheduling(scheduler_model, slots=1)
    popular = adapter("popular")
    scheduling.add([1] * 90, popular, max_tokens=12)
    scheduling.step()
    rare = scheduling.add([2] * 10, adapter("rare"))
    for steps in range(150):
        scheduling.add(unlike(steps), popular, max_tokens=12)
        scheduling.step()
    assert rare.num_computed_tokens == 0


def test_base_requests_are_never_held_back(scheduler_model: Path, patched: None) -> None:
    """Nor while others are hidden behind one that waited too long."""
    scheduling = Scheduling(scheduler_model, slots=1, budget=256)
    popular = adapter("popular", "lora")
    scheduling.add([1] * 90, popular, max_tokens=60)
    scheduling.step()
    rare = scheduling.add([2] * 10, adapter("rare"))
    for steps in range(30):
        behind = scheduling.add(unlike(steps), popular, max_tokens=60)
        base = scheduling.add([3 + steps] * 10)
        scheduling.step()
        assert base.num_computed_tokens > 0
    assert rare.num_computed_tokens == behind.num_computed_tokens == 0  # one without a slot, one hidden


def test_the_wait_is_eight_steps_for_each_that_waits_before(scheduler_model: Path, patched: None) -> None:
    scheduling = Scheduling(scheduler_model, slots=1, budget=256)
    popular = adapter("popular", "lora")
    scheduling.add([1] * 20, popular, max_tokens=20)
    scheduling.step()
    rare = [scheduling.add([2] * 10, adapter(f"rare{index}", "lora"), max_tokens=2) for index in range(3)]
    passed = [0, 0, 0]
    for steps in range(200):
        later = scheduling.add(unlike(steps), popular, max_tokens=20)
        scheduling.step()
        for index, request in enumerate(rare):
            passed[index] += bool(later.num_computed_tokens and not request.num_computed_tokens)
    assert all(request.num_output_tokens == 2 for request in rare)
    assert [0 < count <= 8 * (index + 1) for index, count in enumerate(passed)] == [True] * 3
