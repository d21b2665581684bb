"""From the rule to a step's token map: plain arrays, the same for both runners.

Decided position by position, never by what kind of step it is: one step can hold a chunk of prompt, the last token of a
prompt whose beginning was cached, a chunk that straddles n after a preemption, and a decoded token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine_patch.kernels.step import Ints, Runs
from engine_patch.rule import num_adapted

Bools = npt.NDArray[np.bool_]


def adapted_counts(prefill_only: Bools, num_prompt: Ints, num_computed: Ints, num_scheduled: Ints) -> Ints:
    """How many of each request's scheduled tokens are adapted, always the first ones.

    Args:
        prefill_only: whether the request's adapter acts on prompt tokens only, `[num_requests]`, as are all others.
        num_prompt: n, the number of prompt tokens.
        num_computed: the first position of this step.
        num_scheduled: the number of positions of this step.
    """
    return np.where(prefill_only, num_adapted(num_prompt, num_computed, num_scheduled), num_scheduled)


def adapter_runs(adapter_ids: Ints, num_adapted_tokens: Ints, num_scheduled: Ints) -> Runs:
    """The adapter id of every token of the step, 0 for none, as two runs for each request. Inputs are `[num_requests]`."""
    ids = np.stack([adapter_ids, np.zeros_like(adapter_ids)], axis=1)
    counts = np.stack([num_adapted_tokens, num_scheduled - num_adapted_tokens], axis=1)
    return Runs(ids.ravel().astype(np.int64), counts.ravel().astype(np.int64))
