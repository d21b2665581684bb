"""The weights of a trainer's memory land where `pack` puts them, bit for bit."""

from __future__ import annotations

import pytest
import torch

from engine_patch.adapter import LowRankPair
from engine_patch.pool.gather import Gather
from engine_patch.store.layout import ModuleLayout, PageLayout, plan_pages
from engine_patch.store.pages import pack

SHAPES = {
    "model.layers.10.self_attn.q_proj": (24, 40),
    "model.layers.2.self_attn.q_proj": (24, 40),
    "model.layers.2.self_attn.v_proj": (24, 8),
    "model.layers.2.mlp.down_proj": (56, 24),
    "model.layers.2.residual": (24, 24),
    "model.layers.0.residual": (24, 24),
}


def draw(rank: int, dtype: torch.dtype, seed: int = 0) -> dict[str, LowRankPair]:
    """Random pairs, some with a rank of their own; no two numbers alike."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for index, (name, (size_in, size_out)) in enumerate(SHAPES.items()):
        r, stream = rank + index % 2, name.endswith("residual")
        a, b, bias = (
            torch.randn(shape, generator=generator).to(dtype) for shape in ((r, size_in), (size_out, r), (r,))
        )
        pairs[name] = LowRankPair(a, b, 1.0 if stream else 2.0, bias if stream else None)
    return pairs


def layout_of(pairs: dict[str, LowRankPair], itemsize: int = 4) -> PageLayout:
    modules = {
        name: ModuleLayout(p.rank, p.in_features, p.out_features, p.scaling, p.bias is not None)
        for name, p in pairs.items()
    }
    return plan_pages(modules, itemsize)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, every second element of a larger tensor."""
    wide = tensor.repeat_interleave(2, dim=-1)
    return wide[..., ::2]


MEMORIES = {
    "plain": lambda pair: pair,
    "b transposed": lambda pair: LowRankPair(pair.a, pair.b.t().contiguous().t(), pair.scaling, pair.bias),
    "a transposed": lambda pair: LowRankPair(pair.a.t().contiguous().t(), pair.b, pair.scaling, pair.bias),
    "with gaps": lambda pair: pair.map(with_gaps),
    "parameters": lambda pair: pair.map(torch.nn.Parameter),
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_equals_pack_for_every_order_in_memory(memory: str, rank: int) -> None:
    pairs = {name: MEMORIES[memory](pair) for name, pair in draw(rank, torch.float32).items()}
    layout = layout_of(pairs)
    gather = Gather(pairs, layout, torch.device("cpu"))
    for seed in (0, 1):  # the index is of shapes, not of the weights that it was made with
        plain = draw(rank, torch.float32, seed)
        again = {name: MEMORIES[memory](plain[name]) for name in reversed(plain)}
        found = gather(again)
        assert not found.requires_grad
        assert torch.equal(found, pack(plain, layout).view(-1))


def test_bits_of_every_kind_of_number_stay() -> None:
    pairs = draw(4, torch.float32)
    odd = torch.tensor([-0.0, float("inf"), float("-inf"), float("nan"), 1e-42])
    for pair in pairs.values():
        pair.a.view(-1)[: len(odd)] = odd
        pair.b.view(-1)[: len(odd)] = odd
    layout = layout_of(pairs)
    found = Gather(pairs, layout, torch.device("cpu"))(pairs)
    assert torch.equal(found.view(torch.int32), pack(pairs, layout).view(-1).view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_taken_as_it_is(dtype: torch.dtype) -> None:
    pairs = draw(8, dtype)
    layout = layout_of(pairs, itemsize=2)
    found = Gather(pairs, layout, torch.device("cpu"))(pairs)
    assert found.dtype == dtype
    assert torch.equal(found, pack(pairs, layout).view(-1))
