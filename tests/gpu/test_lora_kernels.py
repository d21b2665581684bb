"""The kernels for adapters in a pool, on a GPU, at the sizes of real models: against the reference on the same GPU."""

from __future__ import annotations

import pytest
import torch

from engine_patch.kernels.reference import silu_and_mul_reference
from tests import lora_pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and vLLM's CUDA build"),
]

RANKS = (1, 4, 8, 12, 0, 64, 320, 8)
SHAPES = [
    (896, (896, 128, 128)),
    (896, (4864, 4864)),
    (4864, (896,)),
    (4096, (14336, 14336)),
    (14336, (4096,)),
    (75, (70, 9)),
]
STREAMS = [896, 4096, 75]
"""Widths of residual streams, on which adapters intervene."""

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Of the largest element: y is rounded once, and so is the product in between."""


@pytest.fixture(autouse=True)
def _exact_reference() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def make(in_features: int, widths: tuple[int, ...], dtype: torch.dtype, skip: int = 0) -> lora_pool.Layer:
    """Slot s has rank RANKS[s], but one of its slices may go without; the slot of rank 0 is empty. No widths: a stream."""
    if not widths:
        return lora_pool.make_stream(in_features, RANKS, dtype, skip=skip, device="cuda")
    ranks = [
        [rank if (slot + index) % 4 or len(widths) == 1 else 0 for index in range(len(widths))]
        for slot, rank in enumerate(RANKS)
    ]
    return lora_pool.make_layer(in_features, widths, ranks, dtype, skip=skip, device="cuda")


def draw_slots(mix: str, num_slots: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if mix == "one token":
        return torch.tensor([3], device="cuda")
    if mix == "none":
        return torch.full((40,), -1, device="cuda")
    if mix == "decode":  # one token a slot, and some without
        return torch.tensor([-1, *range(num_slots), -1, -1], device="cuda")
    if mix == "one adapter":
        return torch.full((1000,), 6, device="cuda")
    tokens = {"small": 300, "middling": 1500, "large": 8192}[mix]
    return torch.randint(-1, num_slots, (tokens,), generator=generator).to("cuda")


def check(layer: lora_pool.Layer, slots: torch.Tensor, tolerance: float | None = None) -> None:
    y, x = lora_pool.inputs(layer, slots.size(0))
    before, expected, x_before = y.clone(), y.clone(), x.clone()
    lora_pool.add_reference(expected, x, layer, slots)
    step = lora_pool.Step(layer, slots)
    lora_pool.add(y, x, step)
    error = (y.float() - expected.float()).abs().max().item()
    tolerance = TOLERANCES[layer.pool.dtype] if tolerance is None else tolerance
    assert error <= tolerance * expected.float().abs().max().item()
    assert torch.equal(x, x_before)
    same = lora_pool.untouched(layer, slots)
    assert torch.equal(y[same], before[same])
    again = before.clone()
    lora_pool.add(again, x, step)
    assert torch.equal(again, y)  # deterministic


@pytest.mark.parametrize("mix", ["one token", "none", "decode", "one adapter", "small", "middling", "large"])
@pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param((width, ()), id=f"stream {width}") for width in STREAMS)], ids=str
)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_equals_the_reference(dtype: torch.dtype, shape: tuple[int, tuple[int, ...]], mix: str) -> None:
    layer = make(*shape, dtype)
    check(layer, draw_slots(mix, len(RANKS)))


@pytest.mark.parametrize("mix", ["one token", "none", "decode", "small", "middling", "large"])
@pytest.mark.parametrize("shape", [(896, 4864), (4096, 14336), (75, 70)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_activation_adds_what_the_layer_would(dtype: torch.dtype, shape: tuple[int, int], mix: str) -> None:
    layer, slots = make(shape[0], (shape[1], shape[1]), dtype), draw_slots(mix, len(RANKS))
    y, x = lora_pool.inputs(layer, slots.size(0))
    expected = y.clone()
    lora_pool.add_reference(expected, x, layer, slots)
    expected = silu_and_mul_reference(expected)
    out = lora_pool.add_silu_and_mul(y, x, lora_pool.Step(layer, slots))
    error = (out.float() - expected.float()).abs().max().item()
    assert error <= 2 * TOLERANCES[dtype] * expected.float().abs().max().item()  # of a product of two such numbers


@pytest.mark.parametrize("mix", ["small", "large"])
@pytest.mark.parametrize("width", STREAMS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_interventions_see_the_stream_as_pytorch_rounds_it(dtype: torch.dtype, width: int, mix: str) -> None:
    check(lora_pool.make_selecting_stream(width, 13, dtype, "cuda"), draw_slots(mix, 1), tolerance=0.0)


@pytest.mark.parametrize("tokens", [130, 8192])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_interventions_of_every_rank(dtype: torch.dtype, tokens: int) -> None:
    layer = lora_pool.make_stream(896, range(1, 65), dtype, device="cuda")
    check(layer, torch.arange(tokens, device="cuda") * 65 // tokens - 1)


@pytest.mark.parametrize("widths", [(896, 128, 128), ()], ids=["linear", "stream"])
def test_beyond_32_bit_offsets(widths: tuple[int, ...]) -> None:
    """A pool of more than 2**31 elements."""
    check(make(896, widths, torch.bfloat16, skip=2**31 + 16), draw_slots("small", len(RANKS)))


@pytest.mark.parametrize("widths", [(896,), ()], ids=["linear", "stream"])
def test_compiled_by_inductor(widths: tuple[int, ...]) -> None:
    lora_pool.check_compiled(make(896, widths, torch.float32), "inductor")


@pytest.mark.parametrize("kind", ["linear", "stream", "activation"])
def test_a_replayed_graph_takes_the_new_step(kind: str) -> None:
    """Captured with one mix of adapters, replayed with others, with fewer tokens, with nearly none, and with a changed table."""
    layer = make(896, () if kind == "stream" else (4864, 4864), torch.bfloat16)
    tokens, num_slots = 64, len(RANKS)
    step = lora_pool.Step(layer, torch.zeros(tokens, dtype=torch.int64, device="cuda"), 128)
    y, x = lora_pool.inputs(layer, tokens)
    before = y.clone()

    def compute() -> torch.Tensor:
        if kind == "activation":
            return lora_pool.add_silu_and_mul(y, x, step)
        lora_pool.add(y, x, step)
        return y

    compute()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for seed, used in enumerate((64, 64, 17, 5, 64)):
        slots = torch.randint(-1, num_slots, (used,), generator=torch.Generator().manual_seed(seed)).to("cuda")
        if seed == 3:
            slots[1:] = -1
        if seed == 4:
            layer.table[[0, 1]] = layer.table[[1, 0]]
        step.set(slots)
        y.copy_(before)
        graph.replay()
        expected = before[:used].clone()
        lora_pool.add_reference(expected, x[:used], layer, slots)
        if kind == "activation":
            expected = silu_and_mul_reference(expected)
        error = (out[:used].float() - expected.float()).abs().max().item()
        assert error <= 2 * TOLERANCES[torch.bfloat16] * expected.float().abs().max().item()
        assert kind == "activation" or torch.equal(out[used:], before[used:])


def test_a_pointer_of_another_alignment_is_another_variant() -> None:
    """A view that begins in the middle of 16 bytes, after one that does not."""
    layer = make(896, (896,), torch.bfloat16)
    slots = draw_slots("small", len(RANKS))
    y, x = lora_pool.inputs(layer, slots.size(0))
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)
    step, results = lora_pool.Step(layer, slots), []
    for source in (x, shifted):
        out = y.clone()
        lora_pool.add(out, source, step)
        results.append(out)
    assert torch.equal(*results)
