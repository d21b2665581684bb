"""The V2 runner (vLLM's default on GPU): which adapter each token of a step gets, and how many adapters the step has.

Upstream: `LoraState` gives every token of a request the request's adapter, and counts the adapters of all requests of the
step to choose a CUDA graph. Needed: both by position, so that a step without adapted tokens replays the graphs of a server
without adapters; and two contents under one name are two adapters, though their `LoRARequest`s are equal. Still fits while
`RequestState.prompt_len` is n (`prefill_len` grows when a preempted request comes back), `num_computed_tokens_np` is the
first position of the step, and both runner methods that need adapters ask `LoraState` (see `contract.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine_patch.kernels.step import NO_RUNS, Ints, Runs
from engine_patch.patching import put, replace
from engine_patch.ref import is_prefill_only
from engine_patch.runners.token_map import Bools, adapted_counts, adapter_runs


def patch() -> None:
    """Put the rule into `LoraState`, and give it sight of the runner's request states."""
    from vllm.v1.worker.gpu.lora_utils import LoraState
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def make_init(upstream: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            upstream(self, *args, **kwargs)
            attach(self.lora_state, self.req_states)

        return __init__

    def make_add(upstream: Any) -> Any:
        def add_request(self: Any, req_id: str, req_index: int, lora_request: Any) -> None:
            upstream(self, req_id, req_index, lora_request)
            self.preft_prefill_only[req_index] = is_prefill_only(lora_request)

        return add_request

    replace(GPUModelRunner, "__init__", make_init)
    replace(LoraState, "add_request", make_add)
    put(LoraState, "make_lora_inputs", make_lora_inputs)
    put(LoraState, "get_activate_loras", get_activate_loras)


def attach(lora_state: Any, req_states: Any) -> None:
    """Let `lora_state` see n and the computed positions of every request; both have one row for each request slot."""
    lora_state.preft_req_states = req_states
    lora_state.preft_prefill_only = np.zeros(len(lora_state.lora_ids), dtype=bool)


def make_lora_inputs(
    self: Any, req_ids: list[str], idx_mapping: Ints, num_scheduled_tokens: Ints
) -> tuple[tuple[int, ...], Runs, list[Any]]:
    """The adapter id of every sampled row and of every token of the step, and the requests of the adapters that act.

    Args:
        self: the runner's `LoraState`.
        req_ids: the requests of the step, in batch order.
        idx_mapping: their rows in the states, `[num_requests]`.
        num_scheduled_tokens: `[num_requests]`.
    """
    if not some_act(self):
        return (0,) * len(idx_mapping), NO_RUNS, []
    states, ids = self.preft_req_states, self.lora_ids[idx_mapping]
    prefill_only = self.preft_prefill_only[idx_mapping]
    adapted = adapted_counts(
        prefill_only,
        states.prompt_len.np[idx_mapping],
        states.num_computed_tokens_np[idx_mapping],
        num_scheduled_tokens,
    )
    runs = adapter_runs(ids, adapted, num_scheduled_tokens)
    # Nothing adapts the LM head.
    return (0,) * len(idx_mapping), runs, _requests(self, req_ids, (ids != 0) & (adapted > 0))


def some_act(self: Any) -> bool:
    """Whether any request may have an adapted token ahead: if not, nothing is asked for each request of a step.

    Requests that have left count until their rows are used again, if they had some of their prompt to compute, or an all-token
    adapter. That costs time alone.
    """
    states = self.preft_req_states
    in_prompt = states.num_computed_tokens_np < states.prompt_len.np
    return bool(((self.lora_ids != 0) & (in_prompt | ~self.preft_prefill_only)).any())


def get_activate_loras(self: Any, req_ids: list[str]) -> list[Any]:
    """The adapters that act on some token of the step: of a prefill-only request, until its prompt is computed.

    Upstream chooses the step's CUDA graph by the length of this.
    """
    if not some_act(self):
        return []
    states = self.preft_req_states
    rows = np.fromiter((states.req_id_to_index[id_] for id_ in req_ids), dtype=np.intp, count=len(req_ids))
    one = np.ones(len(rows), dtype=np.int64)  # every request of a step has at least one token; the first decides
    adapted = adapted_counts(
        self.preft_prefill_only[rows], states.prompt_len.np[rows], states.num_computed_tokens_np[rows], one
    )
    return _requests(self, req_ids, (self.lora_ids[rows] != 0) & (adapted > 0))


def _requests(self: Any, req_ids: list[str], acts: Bools) -> list[Any]:
    """The `LoRARequest` of each distinct adapter id among the requests where `acts`, `[num_requests]`."""
    requests = (self.lora_requests[req_ids[row]] for row in np.flatnonzero(acts).tolist())
    return list({request.lora_int_id: request for request in requests}.values())
