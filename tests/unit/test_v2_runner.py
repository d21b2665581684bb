"""The V2 runner's seam, on CPU: vLLM's `LoraState` with request states as the runner keeps them, against the rule."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from engine_patch import patching
from engine_patch.kernels.step import NO_RUNS
from engine_patch.ref import AdapterRef
from engine_patch.runners import v2

MAX_REQUESTS = 12


@pytest.fixture(autouse=True)
def patched(upstream: None) -> None:
    """The patch, in this test alone."""
    v2.patch()


def adapter(id_: int, method: str = "lorap", name: str | None = None) -> Any:
    path = AdapterRef(Path(f"/store/{id_}.preft"), method, f"digest{id_}").encode()
    return LoRARequest(name or f"name{id_}", id_, path)


class Runner:
    """Stands for `GPUModelRunner`: its two request states, filled and asked in its order."""

    def __init__(self) -> None:
        from vllm.v1.worker.gpu.lora_utils import LoraState

        # As RequestState has them: one row for each slot, and lists of free ones.
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            prompt_len=SimpleNamespace(np=np.zeros(MAX_REQUESTS, dtype=np.int32)),
            prefill_len=SimpleNamespace(np=np.zeros(MAX_REQUESTS, dtype=np.int32)),
            num_computed_tokens_np=np.zeros(MAX_REQUESTS, dtype=np.int32),
        )
        self.lora_state = LoraState(max_num_reqs=MAX_REQUESTS)
        self.free = list(range(MAX_REQUESTS))
        v2.attach(self.lora_state, self.req_states)

    def add(self, req_id: str, n: int, computed: int, request: Any, sampled: int = 0) -> None:
        """A new request, or one that comes back with `sampled` tokens, which then count as prefill."""
        row = self.free.pop()
        states = self.req_states
        states.req_id_to_index[req_id] = row
        states.prompt_len.np[row], states.prefill_len.np[row] = n, n + sampled
        states.num_computed_tokens_np[row] = computed
        self.lora_state.add_request(req_id, row, request)

    def remove(self, req_id: str) -> None:
        self.free.append(self.req_states.req_id_to_index.pop(req_id))
        self.lora_state.remove_request(req_id)

    def step(self, scheduled: dict[str, int]) -> tuple[tuple[int, ...], tuple[int, ...], list[Any], int]:
        """What `execute_model` asks: the number of adapters for the graph, then the map, in the order of the batch."""
        from vllm.v1.worker.gpu.lora_utils import get_num_active_loras_for_dispatch

        count = get_num_active_loras_for_dispatch(SimpleNamespace(max_loras=4), self.lora_state, list(scheduled), False)
        order = sorted(scheduled, key=scheduled.__getitem__)  # the runner puts decodes first
        rows = np.array([self.req_states.req_id_to_index[id_] for id_ in order], dtype=np.intp)
        tokens = np.array([scheduled[id_] for id_ in order], dtype=np.int32)
        sampled, runs, active = self.lora_state.make_lora_inputs(order, rows, tokens)
        self.order = order
        per_token = tuple(np.repeat(*runs).tolist()) or (0,) * int(tokens.sum())  # no runs: no token has an adapter
        return sampled, per_token, active, count


@dataclass
class Request:
    adapter: Any
    n: int
    computed: int
    sampled: int


def step_and_check(runner: Runner, requests: dict[str, Request], scheduled: dict[str, int]) -> None:
    sampled, tokens, active, count = runner.step(scheduled)
    expected = [
        request.adapter.lora_int_id
        if request.adapter and ("lora:" in request.adapter.lora_path or position < request.n)
        else 0
        for request, size in ((requests[id_], scheduled[id_]) for id_ in runner.order)
        for position in range(request.computed, request.computed + size)
    ]
    assert list(tokens) == expected
    assert sampled == (0,) * len(scheduled)  # nothing of ours acts on the LM head
    ids = [request.lora_int_id for request in active]
    assert len(ids) == len(set(ids)) == count
    assert set(ids) == set(expected) - {0}


@pytest.mark.parametrize("seed", range(200))
def test_random_steps_equal_the_rule_position_by_position(seed: int) -> None:
    """Chunks, cached prefixes, preemption with sampled tokens, base and all-token requests, names with two contents."""
    rng = random.Random(seed)
    adapters = [
        None,
        adapter(1),
        adapter(2),
        adapter(3, "lora"),
        adapter(4, name="name1"),
        adapter(5, "lora", name="name1"),
    ]
    runner, requests, preempted, made = Runner(), dict[str, Request](), dict[str, Request](), 0
    for _ in range(60):
        if len(requests) < MAX_REQUESTS and rng.random() < 0.5:
            if preempted and rng.random() < 0.5:
                req_id, request = preempted.popitem()
                request.computed = rng.choice([0, 0, rng.randrange(request.n + request.sampled)])  # cached blocks
            else:
                made += 1
                n = rng.choice([1, 2, rng.randint(1, 60)])
                req_id, request = f"r{made}", Request(rng.choice(adapters), n, rng.randrange(n), 0)
            requests[req_id] = request
            runner.add(req_id, request.n, request.computed, request.adapter, request.sampled)
        scheduled = {}
        for req_id, request in requests.items():
            left = request.n + request.sampled - request.computed
            if rng.random() < 0.8:
                scheduled[req_id] = rng.choice([left, 1, rng.randint(1, left)])
        if not scheduled:
            continue
        step_and_check(runner, requests, scheduled)
        for req_id, size in scheduled.items():
            request = requests[req_id]
            request.computed += size
            request.sampled += request.computed == request.n + request.sampled
            row = runner.req_states.req_id_to_index[req_id]
            runner.req_states.num_computed_tokens_np[row] = request.computed  # update_requests, before the next step
        for req_id in [id_ for id_ in requests if rng.random() < 0.1]:
            runner.remove(req_id)
            preempted[req_id] = requests.pop(req_id)


CASES = {
    # n, computed, sampled, scheduled -> adapted
    "whole prompt": (7, 0, 0, 7, 7),
    "a prompt of one token": (1, 0, 0, 1, 1),
    "first chunk": (50, 0, 0, 32, 32),
    "last chunk of one token": (33, 32, 0, 1, 1),
    "all cached but the last": (64, 63, 0, 1, 1),
    "decode": (7, 7, 1, 1, 0),
    "preempted, all at once": (7, 0, 5, 12, 7),
    "preempted, straddles n": (40, 32, 20, 28, 8),
    "preempted, cached up to n": (32, 32, 9, 9, 0),
    "preempted, cached past n": (20, 32, 30, 18, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_every_way_to_come_to_n(case: str) -> None:
    n, computed, sampled, scheduled, adapted = CASES[case]
    runner = Runner()
    runner.add("r", n, computed, adapter(9), sampled)
    _, tokens, active, count = runner.step({"r": scheduled})
    assert tokens == (9,) * adapted + (0,) * (scheduled - adapted)
    assert len(active) == count == (1 if adapted else 0)


def test_a_decode_step_has_no_adapter_and_so_replays_the_graphs_of_a_server_without() -> None:
    runner = Runner()
    for index in range(6):
        runner.add(f"r{index}", 5, 5, adapter(index + 1), sampled=1)
    assert runner.step({f"r{index}": 1 for index in range(6)})[1:] == ((0,) * 6, [], 0)


def test_nothing_is_asked_for_each_request_of_such_a_step() -> None:
    runner = Runner()
    for index in range(3):
        runner.add(f"r{index}", 5, 5, adapter(index + 1), sampled=1)
    rows, ones = np.arange(3), np.ones(3, dtype=np.int32)
    assert runner.lora_state.make_lora_inputs(None, rows, ones) == ((0, 0, 0), NO_RUNS, [])
    assert runner.lora_state.get_activate_loras(None) == []
    runner.add("new", 5, 4, adapter(9))
    assert runner.step({"r0": 1, "new": 1})[3] == 1


def test_a_slot_of_a_request_that_left_does_not_speak_for_the_next() -> None:
    runner = Runner()
    runner.add("old", 50, 0, adapter(1))
    runner.remove("old")
    runner.add("base", 50, 0, None)
    assert runner.step({"base": 50})[1:] == ((0,) * 50, [], 0)
    runner.remove("base")
    runner.add("all", 3, 3, adapter(7, "lora"), sampled=1)
    assert runner.step({"all": 1}) == ((0,), (7,), [runner.lora_state.lora_requests["all"]], 1)


def test_the_prefill_length_is_the_trap() -> None:
    """Mutation: `prefill_len` for n gives sampled tokens the adapter once a preempted request is back."""
    runner = Runner()
    runner.add("r", 7, 0, adapter(9), sampled=5)
    runner.req_states.prompt_len = runner.req_states.prefill_len
    assert runner.step({"r": 12})[1] != (9,) * 7 + (0,) * 5


def test_the_runner_hands_its_states_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GPUModelRunner.__init__` is wrapped so that its `LoraState` sees the request states of the same runner."""
    from vllm.v1.worker.gpu.lora_utils import LoraState
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def init(self: Any, number: int) -> None:
        self.req_states, self.lora_state = SimpleNamespace(number=number), LoraState(MAX_REQUESTS)

    monkeypatch.setattr(patching, "ledger", {})
    monkeypatch.setattr(GPUModelRunner, "__init__", init)
    v2.patch()
    first, second = object.__new__(GPUModelRunner), object.__new__(GPUModelRunner)
    GPUModelRunner.__init__(first, 1)
    GPUModelRunner.__init__(second, 2)
    assert first.lora_state.preft_req_states is first.req_states
    assert second.lora_state.preft_req_states is second.req_states
    assert second.lora_state.preft_prefill_only.tolist() == [False] * MAX_REQUESTS
