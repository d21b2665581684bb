"""The V1 runner (vLLM on CPU): which adapter each token of a step gets.

Upstream: `InputBatch.make_lora_inputs` gives every token of a request the request's adapter, and returns the step's adapters
as a set of `LoRARequest`s, which are equal when their names are. Needed: tokens at positions >= n get none if the method
is prefill-only; and a name that was reloaded while requests for its former content run stands for two adapters.
Still fits while: `num_prompt_tokens` stays n over preemption, and `num_computed_tokens_cpu` is the first position of the
step; both are columns of the same batch (see `contract.py`). The runner also counts adapters by itself, to choose a CUDA graph:
there are none on CPU, and V1 on a GPU is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine_patch.kernels.step import Ints, Runs
from engine_patch.patching import put
from engine_patch.ref import is_prefill_only
from engine_patch.runners.token_map import adapted_counts, adapter_runs


def patch() -> None:
    """Put the rule into `InputBatch.make_lora_inputs`."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    put(InputBatch, "make_lora_inputs", make_lora_inputs)


def make_lora_inputs(
    self: Any, num_scheduled_tokens: Ints, num_sampled_tokens: Ints
) -> tuple[tuple[int, ...], Runs, list[Any]]:
    """The adapter id of every sampled row and of every token of the step, and the requests of the adapters that act.

    Args:
        self: the runner's `InputBatch`.
        num_scheduled_tokens: `[num_requests]`.
        num_sampled_tokens: `[num_requests]`.
    """
    n, requests = self.num_reqs, self.lora_id_to_lora_request
    ids = self.request_lora_mapping[:n]
    prefill_only = np.isin(ids, [id_ for id_, request in requests.items() if is_prefill_only(request)])
    adapted = adapted_counts(
        prefill_only, self.num_prompt_tokens[:n], self.num_computed_tokens_cpu[:n], num_scheduled_tokens
    )
    active = [requests[id_] for id_ in np.unique(ids[adapted > 0]).tolist() if id_]
    # Nothing adapts the LM head.
    return (0,) * int(num_sampled_tokens.sum()), adapter_runs(ids, adapted, num_scheduled_tokens), active
