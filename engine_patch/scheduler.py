"""Adapter slots: a request counts against them only while it has prompt tokens to compute.

Upstream: the adapter of every request that a step computes occupies one of `max_loras`, so no more adapters than slots can
decode at once, and a waiting request whose adapter holds no slot is passed by later ones without end. Needed: a decoding request
of a prefill-only adapter holds none, and counts again when it comes back after a preemption; and a wait of bounded length. Still
fits while `Scheduler.schedule` counts `lora_request.lora_int_id > 0`, takes the waiting requests from `self.waiting` in its order
(those of KV connectors elsewhere), and a running request goes back there by `_preempt_request` only (see `contract.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from engine_patch.patching import replace
from engine_patch.ref import is_prefill_only

MAX_STEPS_PASSED = 8
"""Steps in which later requests may go past the first that waits for a slot; then they wait behind it, and the slots run dry."""


def patch() -> None:
    """Wrap `Scheduler.schedule` and `Scheduler._preempt_request`."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def make_schedule(upstream: Any) -> Any:
        def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.lora_config:
                return upstream(self, *args, **kwargs)
            acting = acting_of(self)
            acting.let_rest()
            if gate := getattr(self, "preft_gate", None):
                gate.ask(self)
            with bounded_wait(self):
                output = upstream(self, *args, **kwargs)
            acting.take(output)
            return output

        return schedule

    def make_preempt(upstream: Any) -> Any:
        def _preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
            upstream(self, request, *args, **kwargs)
            if isinstance(request.lora_request, Resting):
                request.lora_request = request.lora_request.adapter

        return _preempt_request

    replace(Scheduler, "schedule", make_schedule)
    replace(Scheduler, "_preempt_request", make_preempt)


def rests(request: Any) -> bool:
    """Whether `request` needs its adapter no more: it is prefill-only, and every prompt position is computed."""
    return request.num_computed_tokens >= request.num_prompt_tokens and is_prefill_only(request.lora_request)


@dataclass(frozen=True)
class Resting:
    """Stands for the adapter of a request that needs it no more: upstream does not count the id 0.

    Name, path and `adapter_id` stay: the keys of the request's next KV blocks and its KV events are made of them.
    """

    adapter: Any
    """The `LoRARequest`."""
    lora_name: str
    lora_path: str
    adapter_id: int
    lora_int_id: int = 0

    @property
    def name(self) -> str:
        """As `LoRARequest` has it."""
        return self.lora_name


class Acting:
    """The running requests whose adapter acts on a token of the next step; a decoding request costs a step nothing here."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.requests: dict[str, Any] = {}
        """By request id, in the order in which they began."""

    def let_rest(self) -> None:
        """Before a step: leave out what ended or was preempted, and let what has computed its prompt rest."""
        for request_id, request in list(self.requests.items()):
            running = self._scheduler.requests.get(request_id) is request and request.status.name == "RUNNING"
            if running and rests(request):
                adapter = request.lora_request
                request.lora_request = Resting(adapter, adapter.lora_name, adapter.lora_path, adapter.lora_int_id)
                running = False
            if not running:
                del self.requests[request_id]

    def take(self, output: Any) -> None:
        """After a step was scheduled: take in what it began, or began anew."""
        began = (new.req_id for new in output.scheduled_new_reqs)
        for request_id in chain(began, output.scheduled_cached_reqs.resumed_req_ids):
            request = self._scheduler.requests.get(request_id)
            if request is not None and request.lora_request:
                self.requests[request_id] = request

    def adapters(self) -> set[int]:
        """Their ids, each of which takes a slot."""
        return {request.lora_request.lora_int_id for request in self.requests.values()}


def acting_of(scheduler: Any) -> Acting:
    """Of this scheduler."""
    found = getattr(scheduler, "preft_acting", None)
    if found is None:
        found = scheduler.preft_acting = Acting(scheduler)
    return found


@contextmanager
def bounded_wait(scheduler: Any) -> Iterator[None]:
    """Hide the requests that need slots and stand behind one that was passed too often.

    While they are hidden, requests that hold slots end or finish their prompts and none takes their place, so a slot comes free.
    Base requests go on as ever.
    """
    starved = first_without_slot(scheduler)
    if starved is None:
        yield
        return
    waiting = scheduler.waiting
    behind: list[Any] = []
    if getattr(starved, "preft_steps_passed", 0) >= MAX_STEPS_PASSED:
        order = list(waiting)
        behind = [request for request in order[order.index(starved) + 1 :] if adapter_of(request)]
        waiting.remove_requests(behind)
    num_running = len(scheduler.running)
    try:
        yield
    finally:
        for request in behind:
            waiting.add_request(request)
    if len(scheduler.running) > num_running:
        starved.preft_steps_passed = getattr(starved, "preft_steps_passed", 0) + 1


def first_without_slot(scheduler: Any) -> Any:
    """The first waiting request that upstream will skip because all slots are taken by others; None if there is none."""
    if not scheduler.waiting:
        return None
    taken = acting_of(scheduler).adapters()
    if len(taken) < scheduler.lora_config.max_loras:
        return None
    taken.add(0)
    return next(
        (
            request
            for request in scheduler.waiting
            # A request that waits for its grammar or for its adapter's file is skipped for that, slot or no slot.
            if adapter_of(request) not in taken
            and not scheduler._is_blocked_waiting_status(request.status)
            and admitted(scheduler, request)
        ),
        None,
    )


def admitted(scheduler: Any, request: Any) -> bool:
    """Whether the scheduler's gate (see `readiness`), if it has one, lets a waiting request pass."""
    gate = getattr(scheduler, "preft_gate", None)
    failed = request.request_id in scheduler.grammar_compile_error_reqs  # ends with an error after this step
    return not failed and (gate is None or bool(gate.admits(request)))


def adapter_of(request: Any) -> int:
    """The id under which `request` counts against the slots; 0 for none."""
    return request.lora_request.lora_int_id if request.lora_request else 0
