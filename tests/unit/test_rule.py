"""The rule itself, and the token map that the V1 runner makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_patch.rule import is_prefill_only, num_adapted
from engine_patch.runners.token_map import adapted_counts, adapter_runs

sizes = st.integers(min_value=0, max_value=50)


@given(n=sizes, start=sizes, count=sizes)
def test_counts_exactly_the_positions_below_n(n: int, start: int, count: int) -> None:
    assert num_adapted(n, start, count) == sum(1 for position in range(start, start + count) if position < n)


def test_methods() -> None:
    assert is_prefill_only("lorap")
    assert not is_prefill_only("lora")
    with pytest.raises(ValueError, match="unknown adapter method 'lorpa'"):
        is_prefill_only("lorpa")


requests = st.lists(
    st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 20), st.integers(0, 30), st.integers(1, 20)),
    min_size=1,
    max_size=8,
)


@given(requests)
def test_token_map_equals_position_by_position(rows: list[tuple[int, bool, int, int, int]]) -> None:
    """Chunks before, across and after n, decoded tokens, base requests and all-token adapters in one step."""
    ids, prefill_only, prompt, computed, scheduled = (np.array(column) for column in zip(*rows, strict=True))
    tokens = np.repeat(*adapter_runs(ids, adapted_counts(prefill_only, prompt, computed, scheduled), scheduled))
    expected = [
        row_id if (position < n or not only) else 0
        for row_id, only, n, start, count in rows
        for position in range(start, start + count)
    ]
    assert tokens.tolist() == expected
