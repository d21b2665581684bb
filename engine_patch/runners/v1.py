"""The V1 runner (vLLM on CPU): which adapter each token of a step gets.

Upstream: `InputBatch.make_lora_inputs` gives every token of a request the request's adapter.
Needed: tokens at positions >= n, the request's prompt length, get none if its method is prefill-only. Decided position by
position, since a step can hold a chunk of prompt, a chunk that straddles n after a preemption, and a decoded token.
Still fits while: `num_prompt_tokens` stays n over preemption, and `num_computed_tokens_cpu` is the first position of the
step; both are columns of the same batch (see `contract.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine_patch.patching import replace
from engine_patch.ref import parse_ref
from engine_patch.rule import num_adapted

Ints = npt.NDArray[np.int64]


def adapted_counts(
    prefill_only: npt.NDArray[np.bool_], num_prompt: Ints, num_computed: Ints, num_scheduled: Ints
) -> Ints:
    """How many of each request's scheduled tokens are adapted, always the first ones; all arrays `[num_requests]`."""
    return np.where(prefill_only, num_adapted(num_prompt, num_computed, num_scheduled), num_scheduled)


def token_adapters(adapter_ids: Ints, num_adapted_tokens: Ints, num_scheduled: Ints) -> Ints:
    """The adapter id of every token of the step, `[num_tokens]`; 0 means none. Inputs are `[num_requests]`."""
    ids = np.stack([adapter_ids, np.zeros_like(adapter_ids)], axis=1)
    counts = np.stack([num_adapted_tokens, num_scheduled - num_adapted_tokens], axis=1)
    return np.repeat(ids.ravel(), counts.ravel())


def patch() -> None:
    """Put the rule into `InputBatch.make_lora_inputs`."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    def make(upstream: Any) -> Any:
        def make_lora_inputs(self: Any, num_scheduled_tokens: Ints, num_sampled_tokens: Ints) -> Any:
            requests = self.lora_id_to_lora_request
            prefill_only_ids = [id_ for id_, request in requests.items() if _is_prefill_only(request)]
            if not prefill_only_ids:
                return upstream(self, num_scheduled_tokens, num_sampled_tokens)
            n = self.num_reqs
            ids = self.request_lora_mapping[:n]
            prefill_only = np.isin(ids, prefill_only_ids)
            adapted = adapted_counts(
                prefill_only, self.num_prompt_tokens[:n], self.num_computed_tokens_cpu[:n], num_scheduled_tokens
            )
            tokens = token_adapters(ids, adapted, num_scheduled_tokens)
            # Adapters on the LM head are refused when loading, so the rows of the sampler need none.
            sampled = np.where(prefill_only, 0, ids).repeat(num_sampled_tokens)
            active = {requests[id_] for id_ in np.unique(tokens).tolist() if id_}
            return tuple(sampled.tolist()), tuple(tokens.tolist()), active

        return make_lora_inputs

    replace(InputBatch, "make_lora_inputs", make)


def _is_prefill_only(request: Any) -> bool:
    ref = parse_ref(request.lora_path)
    return ref is not None and ref.prefill_only
