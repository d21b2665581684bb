"""The kernels for GPUs: the reference against a loop over tokens, and the Triton kernels against the reference.

Without a GPU, the kernels run in Triton's interpreter, if Triton is installed. It multiplies no bfloat16:
`tests.gpu.test_lora_kernels` does, at real sizes.
"""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_patch.kernels.reference import add_lora_reference, bits_to_scale, scale_to_bits
from engine_patch.kernels.tiles import choose_tiles, power_of_two
from tests import lora_pool

HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if HAS_TRITON and DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

needs_triton = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: without a GPU, pip install triton for its interpreter"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

MIXED = [(1, 1, 1), (4, 0, 8), (0, 0, 0), (12, 12, 12), (0, 20, 0), (70, 16, 3)]
"""Ranks on three slices: slot 2 is empty, and others leave slices alone."""


def draw_slots(num_tokens: int, num_slots: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, num_slots, (num_tokens,), generator=generator).to(DEVICE)


def check(layer: lora_pool.Layer, slots: torch.Tensor, tolerance: float, align: int = 1) -> None:
    """Near the reference, and what no adapter adapts is unchanged bit for bit."""
    y, x = lora_pool.inputs(layer, slots.size(0))
    before, expected = y.clone(), y.clone()
    add_lora_reference(expected, x, layer.pool, layer.table, layer.slices, slots)
    lora_pool.add_lora(y, x, layer, lora_pool.step_metadata(slots, layer.table.size(0)), align)
    assert (y - expected).abs().max().item() <= tolerance * expected.abs().max().item()
    same = lora_pool.untouched(layer, slots)
    assert torch.equal(y[same], before[same])
    assert slots.max() < 0 or not torch.equal(y, before)


def test_scale_bits() -> None:
    assert scale_to_bits(2.0) == 0x40000000
    assert [bits_to_scale(scale_to_bits(scale)) for scale in (0.5, -3.0)] == [0.5, -3.0]
    assert bits_to_scale(scale_to_bits(-3.0) | (7 << 32)) == -3.0


def test_the_reference_equals_token_by_token() -> None:
    layer = lora_pool.make_layer(29, (17, 3, 5), MIXED, torch.float32)
    slots = draw_slots(23, len(MIXED)).cpu()
    y, x = lora_pool.inputs(layer, 23)
    expected = y.double().clone()
    for row, slot in enumerate(slots.tolist()):
        for (start, width), (a, b, rank, bits) in zip(layer.slices.tolist(), layer.table[slot].tolist(), strict=True):
            if slot >= 0 and rank > 0:
                down = layer.pool[a : a + rank * 29].double().view(rank, 29)
                up = layer.pool[b : b + rank * width].double().view(rank, width)
                expected[row, start : start + width] += bits_to_scale(bits) * (up.T @ (down @ x[row].double()))
    add_lora_reference(y, x, layer.pool, layer.table, layer.slices, slots)
    assert torch.allclose(y.double(), expected, atol=1e-4)


def test_tiles() -> None:
    """Powers of two at all sizes; and, for batch invariance, the same ones for all numbers of tokens."""
    assert [power_of_two(least) for least in (1, 2, 3, 33, 64)] == [1, 2, 4, 64, 64]
    for tokens in (1, 512, 513, 4096, 8192):
        for features in (5, 896, 14336):
            tiles = choose_tiles(tokens, features, 3, 320, False)
            assert all(size == power_of_two(size) for size in vars(tiles).values() if size != 3)
            assert tiles.rank == 64
    assert len({choose_tiles(tokens, 896, 3, 8, False, True) for tokens in (1, 600, 8192)}) == 1
    assert choose_tiles(1, 896, 3, 8, False).rank == 16


class TestTriton:
    pytestmark = needs_triton

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("tokens", [1, 37, 600])
    def test_equals_the_reference(self, dtype: torch.dtype, tokens: int) -> None:
        """At odd sizes, with tiles for few and for many tokens, and ranks above a tile's."""
        layer = lora_pool.make_layer(75, (70, 9, 33), MIXED, dtype, device=DEVICE)
        check(layer, draw_slots(tokens, len(MIXED)), 1e-5 if dtype == torch.float32 else 2e-3)

    def test_sums_shared_by_programs(self) -> None:
        layer = lora_pool.make_layer(1040, (48,), [(4,), (0,), (17,)], torch.float32, device=DEVICE)
        assert choose_tiles(20, 1040, 1, 17, True).splits == 4
        check(layer, draw_slots(20, 3), 1e-5, align=16)

    def test_several_blocks_of_one_adapter_beside_small_groups(self) -> None:
        layer = lora_pool.make_layer(32, (16, 16), [(8, 8)] * 4, torch.float32, device=DEVICE)
        sizes = {-1: 15, 0: 33, 1: 1, 2: 16, 3: 31}
        slots = torch.tensor([slot for slot, size in sizes.items() for _ in range(size)], device=DEVICE)
        for seed in range(3):
            order = torch.randperm(slots.size(0), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
            check(layer, slots[order], 1e-5, align=16)

    def test_groups_of_all_sizes(self) -> None:
        """Every token is found whatever the groups' sizes are, up to all of one group."""
        generator = torch.Generator().manual_seed(0)
        layer = lora_pool.make_layer(16, (16,), [(1,)] * 7, torch.float32, device=DEVICE)
        for tokens in (1, 15, 16, 17, 32, 64, 65):
            weights = torch.rand(8, generator=generator) ** 4
            slots = torch.multinomial(weights, tokens, True, generator=generator) - 1
            check(layer, slots.to(DEVICE), 1e-5)
            check(layer, torch.full((tokens,), 6, device=DEVICE), 1e-5)

    def test_no_adapter_in_the_step(self) -> None:
        """The op returns at once; and a replayed graph, which runs the kernels all the same, changes nothing."""
        layer = lora_pool.make_layer(32, (16,), [(8,)] * 2, torch.float32, device=DEVICE)
        y, x = lora_pool.inputs(layer, 20)
        before = y.clone()
        metadata = list(lora_pool.step_metadata(torch.full((20,), -1, device=DEVICE), 2))
        assert metadata[5].item()
        lora_pool.add_lora(y, x, layer, tuple(metadata))
        metadata[5] = torch.tensor([False])
        lora_pool.add_lora(y, x, layer, tuple(metadata))
        assert torch.equal(y, before)

    def test_a_step_smaller_than_the_captured_graph(self) -> None:
        layer = lora_pool.make_layer(32, (16,), [(8,)] * 2, torch.float32, device=DEVICE)
        slots = draw_slots(20, 2)
        y, x = lora_pool.inputs(layer, 48)
        before, expected = y.clone(), y.clone()
        padded = torch.cat([slots, torch.full((28,), -1, device=DEVICE)])
        add_lora_reference(expected, x, layer.pool, layer.table, layer.slices, padded)
        lora_pool.add_lora(y, x, layer, lora_pool.step_metadata(slots, 2, captured=48))
        assert torch.allclose(y, expected, atol=1e-5)
        assert torch.equal(y[20:], before[20:])

    def test_the_wrapper(self) -> None:
        """Through upstream's interface, with a leading dimension of 1, and with x and y as views of wider tensors."""
        layer = lora_pool.make_layer(32, (16, 24), [(8, 3), (2, 0)], torch.float32, device=DEVICE)
        slots = draw_slots(20, 2)
        wrapper = make_wrapper(layer, slots)
        y, x = lora_pool.inputs(layer, 20)
        expected = y.clone()
        add_lora_reference(expected, x, layer.pool, layer.table, layer.slices, slots)
        wide = torch.zeros(20, 50, device=DEVICE)
        wide[:, :40] = y
        for out, given in ((y.unsqueeze(0), x.unsqueeze(0)), (wide[:, :40], torch.cat([x, x], 1)[:, :32])):
            wrapper.add_lora_linear(out, given, (layer.pool,), (layer.table, layer.slices), 1.0, (16, 24))
            assert torch.allclose(out.view(20, 40), expected, atol=1e-5)
        assert not wide[:, 40:].any()

    def test_the_wrapper_compiled(self) -> None:
        """torch.compile makes one graph of it, for all numbers of tokens, and the step's metadata stay out of it."""
        layer = lora_pool.make_layer(32, (16, 24), [(8, 3), (2, 0)], torch.float32, device=DEVICE)
        wrapper = make_wrapper(layer, draw_slots(2, 2))

        def forward(x: torch.Tensor) -> torch.Tensor:
            y = torch.cat([x, x[:, :8]], 1) * 2
            wrapper.add_lora_linear(y, x, (layer.pool,), (layer.table, layer.slices), 1.0, (16, 24))
            return y + 1

        compiled = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch.inference_mode():
            for tokens in (20, 33, 7):
                wrapper.token_mapping_meta.prepare_tensors(draw_slots(tokens, 2, seed=tokens))
                x = lora_pool.inputs(layer, tokens)[1]
                assert torch.equal(compiled(x), forward(x))


def make_wrapper(layer: lora_pool.Layer, slots: torch.Tensor) -> Any:
    """Upstream's initialiser needs an engine's LoRA configuration, and Triton on a GPU."""
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    from engine_patch.kernels.gpu import PoolPunicaWrapper

    wrapper = PoolPunicaWrapper.__new__(PoolPunicaWrapper)
    wrapper.token_mapping_meta = LoRAKernelMeta.make(layer.table.size(0), 64, DEVICE)
    wrapper.token_mapping_meta.prepare_tensors(slots)
    wrapper.lora_config = SimpleNamespace(specialize_active_lora=False, max_lora_rank=layer.max_rank)
    return wrapper
