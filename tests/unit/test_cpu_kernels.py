"""The CPU kernels against a loop over tokens in float64."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from engine_patch.kernels.reference import add_lora_reference, scale_to_bits

kernels = pytest.importorskip("engine_patch.kernels.cpu", reason="needs vLLM")


def test_segments_are_runs_of_one_adapter() -> None:
    found = kernels.find_segments([7, 7, 0, 0, 9, 7], {7: 2, 9: 0})
    assert [tuple(segment) for segment in found] == [(0, 2, 2), (4, 5, 0), (5, 6, 2)]


@pytest.mark.parametrize("seed", range(5))
def test_equals_token_by_token(seed: int) -> None:
    """Random maps with base rows; two fused slices; ranks and scales of each adapter its own; more segments than requests."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    slots, width, outs, tokens = 4, 12, (10, 6), 23
    wrapper = kernels.SegmentPunicaWrapper(max_num_batched_tokens=64, max_batches=2, device="cpu")
    layout: list[int | None] = [11, 12, None, 14]
    ids = [rng.choice([0, 0, 11, 12, 14]) for _ in range(tokens)]
    mapping = SimpleNamespace(index_mapping=tuple(ids), prompt_mapping=(0, 0), is_prefill=True)
    wrapper.update_metadata(mapping, layout, slots + 1, 100)
    pool = torch.randn(4000)
    table = torch.zeros(slots, len(outs), 4, dtype=torch.int64)
    for slot in range(slots):
        for index in range(len(outs)):
            rank, scale = rng.choice((0, 1, 5, 8)), rng.uniform(-2, 2)
            table[slot, index] = torch.tensor([rng.randrange(2000), rng.randrange(2000), rank, scale_to_bits(scale)])
    slices = torch.tensor([[0, 10], [10, 6]], dtype=torch.int32)
    x, y = torch.randn(tokens, width), torch.randn(tokens, sum(outs))
    expected = y.double()
    token_slots = torch.tensor([layout.index(id_) if id_ else -1 for id_ in ids])
    add_lora_reference(expected, x.double(), pool.double(), table, slices, token_slots)
    wrapper.add_lora_linear(y, x, (pool,), (table, slices), 1.0, outs)
    assert torch.allclose(y.double(), expected, atol=1e-4)
    assert torch.equal(y[token_slots < 0].double(), expected[token_slots < 0])


def test_a_layer_that_no_adapter_adapts_is_left_alone() -> None:
    wrapper = kernels.SegmentPunicaWrapper(max_num_batched_tokens=64, max_batches=2, device="cpu")
    wrapper.update_metadata(SimpleNamespace(index_mapping=(7, 7)), [7], 2, 100)
    y = torch.ones(2, 4)
    wrapper.add_lora_linear(y, torch.ones(2, 4), (), (), 1.0, (4,))
    assert torch.equal(y, torch.ones(2, 4))
