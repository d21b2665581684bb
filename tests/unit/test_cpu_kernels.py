"""The CPU kernels against a loop over tokens in float64."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

kernels = pytest.importorskip("engine_patch.kernels.cpu", reason="needs vLLM")


def test_segments_are_runs_of_one_adapter() -> None:
    found = kernels.find_segments([7, 7, 0, 0, 9, 7], {7: 2, 9: 0})
    assert [tuple(segment) for segment in found] == [(0, 2, 2), (4, 5, 0), (5, 6, 2)]


@pytest.mark.parametrize("seed", range(5))
def test_equals_token_by_token(seed: int) -> None:
    """Random maps with base rows; two fused slices; more segments than requests."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    slots, rank, width, outs, tokens = 4, 8, 12, (10, 6), 23
    wrapper = kernels.SegmentPunicaWrapper(max_num_batched_tokens=64, max_batches=2, device="cpu")
    layout: list[int | None] = [11, 12, None, 14]
    ids = [rng.choice([0, 0, 11, 12, 14]) for _ in range(tokens)]
    mapping = SimpleNamespace(index_mapping=tuple(ids), prompt_mapping=(0, 0), is_prefill=True)
    wrapper.update_metadata(mapping, layout, slots + 1, 100)
    a = tuple(torch.randn(slots, 1, rank, width) for _ in outs)
    b = tuple(torch.randn(slots, 1, out, rank) for out in outs)
    x, y = torch.randn(tokens, width), torch.randn(tokens, sum(outs))
    expected = y.double().clone()
    for row, adapter_id in enumerate(ids):
        if adapter_id:
            slot = layout.index(adapter_id)
            delta = [
                bi[slot, 0].double() @ (ai[slot, 0].double() @ x[row].double()) for ai, bi in zip(a, b, strict=True)
            ]
            expected[row] += 0.5 * torch.cat(delta)
    wrapper.add_lora_linear(y, x, a, b, 0.5, outs)
    assert torch.allclose(y.double(), expected, atol=1e-4)


def test_the_lm_head_is_a_stock_adapters_alone() -> None:
    """Rows without one stay as they are, and prompt log-probabilities come with more rows than are sampled."""
    torch.manual_seed(0)
    wrapper = kernels.SegmentPunicaWrapper(max_num_batched_tokens=64, max_batches=4, device="cpu")
    a, b = torch.randn(2, 1, 4, 12), torch.randn(2, 1, 100, 4)
    x, y = torch.randn(3, 12), torch.randn(3, 100)

    def step(*sampling: int) -> None:
        mapping = SimpleNamespace(index_mapping=(7, 7, 0), prompt_mapping=sampling, is_prefill=True)
        wrapper.update_metadata(mapping, [None, 7], 3, 100)

    step(0, 0, 0)
    before = y.clone()
    wrapper.add_lora_logits(y, x, a, b, 1.0)
    many = torch.randn(9, 100)
    wrapper.add_lora_logits(many, torch.randn(9, 12), a, b, 1.0)  # of a prompt
    assert torch.equal(y, before)

    step(0, 7, 0)
    wrapper.add_lora_logits(y, x, a, b, 1.0)
    assert torch.equal(y[[0, 2]], before[[0, 2]])
    assert torch.allclose(y[1], before[1] + b[1, 0] @ (a[1, 0] @ x[1]), atol=1e-4)
