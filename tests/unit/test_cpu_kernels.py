"""The CPU kernels against a loop over tokens in float64."""

from __future__ import annotations

import random

import pytest
import torch

from engine_patch.kernels.reference import add_lora_reference, scale_to_bits
from engine_patch.kernels.step import Place, Runs
from engine_patch.store.layout import PAGE_BYTES

kernels = pytest.importorskip("engine_patch.kernels.cpu", reason="needs vLLM")


@pytest.mark.parametrize("seed", range(5))
def test_equals_token_by_token(seed: int) -> None:
    """Random maps with base rows; two fused slices; ranks and scales of each adapter its own; more segments than requests."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width, outs, tokens = 12, (10, 6), 23
    wrapper = kernels.SegmentPunicaWrapper(max_num_batched_tokens=64, max_batches=2, device="cpu")
    places = {id_: Place(rng.randrange(3), rng.randrange(4), linear=True, streams=False) for id_ in (11, 12, 14)}
    ids = [rng.choice([0, 0, 11, 12, 14]) for _ in range(tokens)]
    wrapper.begin_step(Runs.of(tuple(ids)), places)
    pool = torch.randn(8000)
    table = torch.zeros(3, len(outs), 4, dtype=torch.int64)
    for kind in range(3):
        for index in range(len(outs)):
            rank, scale = rng.choice((0, 1, 5, 8)), rng.uniform(-2, 2)
            table[kind, index] = torch.tensor([rng.randrange(2000), rng.randrange(2000), rank, scale_to_bits(scale)])
    slices = torch.tensor([[0, 10], [10, 6]], dtype=torch.int32)
    x, y = torch.randn(tokens, width), torch.randn(tokens, sum(outs))
    expected = y.double()
    for id_, place in places.items():
        own = pool[place.page * PAGE_BYTES // 4 :].double()
        token_kinds = torch.tensor([place.kind if one == id_ else -1 for one in ids])
        add_lora_reference(expected, x.double(), own, table, slices, token_kinds)
    wrapper.add_lora_linear(y, x, (pool,), (table, slices), 1.0, outs)
    assert torch.allclose(y.double(), expected, atol=1e-4)
    base = torch.tensor(ids) == 0
    assert torch.equal(y[base].double(), expected[base])


def test_a_layer_that_no_adapter_adapts_is_left_alone() -> None:
    wrapper = kernels.SegmentPunicaWrapper(max_num_batched_tokens=64, max_batches=2, device="cpu")
    wrapper.begin_step(Runs.of((7, 7)), {7: Place(0, 0, linear=True, streams=True)})
    y = torch.ones(2, 4)
    wrapper.add_lora_linear(y, torch.ones(2, 4), (), (), 1.0, (4,))
    assert torch.equal(y, torch.ones(2, 4))
