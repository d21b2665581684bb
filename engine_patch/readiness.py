"""A request is scheduled once its adapter has arrived, and one whose adapter cannot be loaded fails alone.

Upstream: a worker reads an adapter's file in the step that needs it, so that all requests wait for the disk, and a file that
cannot be read ends the engine. Needed: loading from the moment that a request is queued, steps that never wait, and an error for
the one request. Still fits while `Scheduler.schedule` asks `_handle_blocked_waiting_request` about every waiting request that it
takes, and `update_from_output` ends the requests in `grammar_compile_error_reqs` with an error (see `contract.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

from engine_patch.patching import put, replace
from engine_patch.pool.tiers import NOT_YET
from engine_patch.proved import unproved
from engine_patch.ref import AdapterRef, parse_ref
from engine_patch.scheduler import acting_of, admitted

logger = logging.getLogger("vllm.preft")

SCANNED = 256
"""Waiting requests whose adapters are asked for, in every step."""

IDS_REMEMBERED = 65536
"""Contents whose number is remembered; then it begins anew."""

PATIENCE_S = 0.005
"""How long an engine with nothing else to do waits for a file before it looks again."""

Want = Callable[[list[str], list[str], float], list[dict[str, str]]]
"""`AdapterTiers.want` of every worker."""


class AdapterGate:
    """Knows, for one step at a time, which adapters have arrived in every worker."""

    def __init__(self, want: Want, unproved_settings: list[str]) -> None:
        self._want, self._unproved = want, unproved_settings
        self._running: list[str] = []
        self._arrived: set[str] = set()
        self._ids: dict[int, str] = {}
        self._digests: dict[str, int] = {}

    def ask(self, scheduler: Any) -> None:
        """Find out before a step; requests whose adapters failed are handed over to be ended with an error."""
        running = {request.lora_request.lora_path: None for request in acting_of(scheduler).requests.values()}
        waiting = self._waiting(scheduler)
        self._arrived = set()
        if not waiting and list(running) == self._running:
            return
        self._running = list(running)
        missing: dict[str, str] = {}
        idle = not scheduler.running and all(request.lora_request for request in islice(scheduler.waiting, SCANNED))
        for answer in self._want(self._running, list(waiting), PATIENCE_S if idle else 0.0):
            for digest, reason in answer.items():
                missing[digest] = missing.get(digest) or reason
        self._arrived = {ref.digest for ref in waiting.values()} - missing.keys()
        failed = {digest: reason for digest, reason in missing.items() if reason != NOT_YET}
        if failed:
            for request in scheduler.waiting:
                if (ref := _ref(request)) and ref.digest in failed:
                    self._fail(scheduler, request, failed[ref.digest])

    def admits(self, request: Any) -> bool:
        """Whether a waiting request may be scheduled in this step, as far as its adapter goes."""
        if not request.lora_request:
            return True
        ref = _ref(request)
        return ref is not None and ref.digest in self._arrived and self._refusal(request) is None

    def _waiting(self, scheduler: Any) -> dict[str, AdapterRef]:
        """The adapters of the requests that come next, in order; refuses what can never be served.

        Last those of requests that wait for something else, such as a grammar: they take no place from what can run.
        """
        ready: dict[str, AdapterRef] = {}
        blocked: dict[str, AdapterRef] = {}
        for request in islice(scheduler.waiting, SCANNED):
            if not request.lora_request:
                continue
            if reason := self._refusal(request):
                self._fail(scheduler, request, reason)
            elif ref := _ref(request):
                found = blocked if scheduler._is_blocked_waiting_status(request.status) else ready
                found[request.lora_request.lora_path] = ref
        return ready | blocked  # an adapter of both keeps its place among the first

    def _refusal(self, request: Any) -> str | None:
        """Why this engine never serves the request's adapter."""
        ref, id_ = _ref(request), request.lora_request.lora_int_id
        if ref is None:
            return "it is a stock adapter: convert it (preft convert), or set PREFT_DISABLE=1 to run the stock engine"
        if ref.prefill_only and self._unproved:
            return f"prefill-only adapters are not served with {'; nor with '.join(self._unproved)}"
        if len(self._ids) >= IDS_REMEMBERED:  # those in use are entered again, since every step asks for them
            self._ids.clear()
            self._digests.clear()
        # vLLM knows adapters by number: one number for two contents would answer with the wrong one.
        if self._ids.setdefault(id_, ref.digest) != ref.digest or self._digests.setdefault(ref.digest, id_) != id_:
            return (
                f"adapter id {id_} stands for another adapter's weights; make requests with"
                " engine_patch.requests.lora_request, in one process"
            )
        return None

    def _fail(self, scheduler: Any, request: Any, reason: str) -> None:
        if request.request_id not in scheduler.grammar_compile_error_reqs:
            logger.error("request %s with adapter %s fails: %s", request.request_id, request.lora_request.name, reason)
        scheduler.grammar_compile_error_reqs.add(request.request_id)


def _ref(request: Any) -> AdapterRef | None:
    return parse_ref(request.lora_request.lora_path) if request.lora_request else None


def patch() -> None:
    """Give the engine core's scheduler a gate, and let it ask."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    def make_after_scheduler(upstream: Any) -> Any:
        def _initialize_effective_attention_block_size(self: Any) -> None:
            upstream(self)
            if self.vllm_config.lora_config:
                executor = self.model_executor
                self.scheduler.preft_gate = AdapterGate(
                    lambda *asked: executor.collective_rpc("preft_want", args=asked), unproved(self.vllm_config)
                )

        return _initialize_effective_attention_block_size

    def make_handle(upstream: Any) -> Any:
        def _handle_blocked_waiting_request(self: Any, request: Any) -> bool:
            return bool(upstream(self, request)) and admitted(self, request)

        return _handle_blocked_waiting_request

    # Not `__init__`: in a process of its own, the engine core loads its plugins there. This it calls once the scheduler is made.
    replace(EngineCore, "_initialize_effective_attention_block_size", make_after_scheduler)
    put(EngineCore, "preft_in_use", in_use)
    replace(Scheduler, "_handle_blocked_waiting_request", make_handle)


def in_use(core: Any) -> list[str]:
    """The contents that requests in the engine use, for RPC."""
    refs = map(_ref, core.scheduler.requests.values())
    return sorted({ref.digest for ref in refs if ref})
