"""The kernels for GPUs: the reference against a loop over tokens, and the Triton kernels against the reference.

Without a GPU, the kernels run in Triton's interpreter, if Triton is installed. It multiplies no bfloat16:
`tests.gpu.test_lora_kernels` does, at real sizes.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from dataclasses import replace

import pytest
import torch

from engine_patch.kernels.layer import LAYERS, Layer, Shared, Weights
from engine_patch.kernels.reference import bits_to_scale, scale_to_bits, silu_and_mul_reference
from engine_patch.kernels.step import Place
from engine_patch.kernels.tiles import (
    EXPAND_PROGRAMS,
    block_rows,
    choose_run,
    choose_splits,
    choose_tiles,
    common_alignment,
    power_of_two,
)
from engine_patch.store.layout import PAGE_BYTES
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

STREAM = [1, 4, 0, 12, 20, 70]
"""Ranks of interventions; the adapter in slot 2 has none on this stream."""

each_kind = pytest.mark.parametrize("kind", ["linear", "stream"])


def mixed(kind: str, dtype: torch.dtype) -> lora_pool.Layer:
    """Ranks below and above a tile's, at odd sizes."""
    if kind == "stream":
        return lora_pool.make_stream(75, STREAM, dtype, device=DEVICE)
    return lora_pool.make_layer(75, (70, 9, 33), MIXED, dtype, device=DEVICE)


def small(kind: str) -> lora_pool.Layer:
    """Two slots, and y of 40 columns."""
    if kind == "stream":
        return lora_pool.make_stream(40, [8, 3], torch.float32, device=DEVICE)
    return lora_pool.make_layer(32, (16, 24), [(8, 3), (2, 0)], torch.float32, device=DEVICE)


def draw_slots(num_tokens: int, num_slots: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, num_slots, (num_tokens,), generator=generator).to(DEVICE)


def check(layer: lora_pool.Layer, slots: torch.Tensor, tolerance: float) -> None:
    """Near the reference; what no adapter adapts is unchanged bit for bit, and so is what is only read."""
    y, x = lora_pool.inputs(layer, slots.size(0))
    before, expected, x_before = y.clone(), y.clone(), x.clone()
    lora_pool.add_reference(expected, x, layer, slots)
    lora_pool.add(y, x, lora_pool.Step(layer, slots))
    assert torch.equal(x, x_before)
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
    expected = y.double()
    for row, slot in enumerate(slots.tolist()):
        for (start, width), (a, b, rank, bits) in zip(layer.slices.tolist(), layer.table[slot].tolist(), strict=True):
            if slot >= 0 and rank > 0:
                down = layer.pool[a : a + rank * 29].double().view(rank, 29)
                up = layer.pool[b : b + rank * width].double().view(rank, width)
                expected[row, start : start + width] += bits_to_scale(bits) * (up.T @ (down @ x[row].double()))
    lora_pool.add_reference(y, x, layer, slots)
    assert torch.allclose(y.double(), expected, atol=1e-4)


def test_the_reference_of_interventions_equals_token_by_token() -> None:
    layer = lora_pool.make_stream(29, STREAM, torch.float32)
    slots = draw_slots(23, len(STREAM)).cpu()
    hidden, residual = lora_pool.inputs(layer, 23)
    expected = hidden.double()
    for row, slot in enumerate(slots.tolist()):
        a, b, rank, bits = layer.table[slot, 0].tolist()
        if slot >= 0 and rank > 0:
            w1 = layer.pool[a : a + rank * 29].double().view(rank, 29)
            bias = layer.pool[a + rank * 29 : a + rank * 30].double()
            w2 = layer.pool[b : b + rank * 29].double().view(rank, 29)
            stream = expected[row] + residual[row]
            expected[row] += bits_to_scale(bits) * ((w1 @ stream + bias) @ w2)
    lora_pool.add_reference(hidden, residual, layer, slots)
    assert torch.allclose(hidden.double(), expected, atol=1e-4)


def test_tiles() -> None:
    """Powers of two at all sizes, of which an engine has two."""
    assert [power_of_two(least) for least in (1, 2, 3, 33, 64)] == [1, 2, 4, 64, 64]
    for rows in {block_rows(tokens, 320) for tokens in (1, 512, 513, 4096, 8192)}:
        tiles = choose_tiles(rows, 320, False)
        assert all(size == power_of_two(size) for name, size in vars(tiles).items() if "stages" not in name)
        assert tiles.rank == 64
    assert choose_tiles(16, 8, False).rank == 16
    assert [choose_splits(1, features) for features in (5, 511, 512, 1040, 14336)] == [1, 1, 2, 4, 8]
    assert {block_rows(tokens, 8, True) for tokens in (1, 600, 8192)} == {32}


@pytest.mark.parametrize("width", [1, 127, 128, 129, 4864, 28672])
def test_runs_cover_all_columns(width: int) -> None:
    for programs in (1, 40, 256, 1000, 5000):
        runs, run = choose_run(width, 128, programs)
        assert (runs - 1) * run * 128 < width <= runs * run * 128
        assert run == 1 or programs * runs * run * 2 > EXPAND_PROGRAMS


def test_alignment() -> None:
    assert [common_alignment(*widths) for widths in ((896, 128), (24,), (16, 24), (75, 16))] == [16, 8, 8, 1]


class TestTriton:
    pytestmark = needs_triton

    @each_kind
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("tokens", [1, 37, 600])
    def test_equals_the_reference(self, dtype: torch.dtype, tokens: int, kind: str) -> None:
        """At odd sizes, with tiles for few and for many tokens, and ranks above a tile's."""
        layer = mixed(kind, dtype)
        check(layer, draw_slots(tokens, len(MIXED)), 1e-5 if dtype == torch.float32 else 2e-3)

    @pytest.mark.parametrize("tokens", [20, 600])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_interventions_see_the_stream_as_pytorch_rounds_it(self, dtype: torch.dtype, tokens: int) -> None:
        layer = lora_pool.make_selecting_stream(75, 13, dtype, DEVICE)
        check(layer, draw_slots(tokens, 1), 0.0)

    def test_interventions_of_every_rank(self) -> None:
        layer = lora_pool.make_stream(48, range(1, 65), torch.float32, device=DEVICE)
        check(layer, torch.arange(-2, 128, device=DEVICE) // 2, 1e-5)

    @each_kind
    def test_sums_shared_by_programs(self, kind: str) -> None:
        """Where a bias must be added once."""
        if kind == "stream":
            layer = lora_pool.make_stream(1040, [4, 0, 17], torch.float32, device=DEVICE)
        else:
            layer = lora_pool.make_layer(1040, (48,), [(4,), (0,), (17,)], torch.float32, device=DEVICE)
        assert choose_splits(1, 1040) == 4
        check(layer, draw_slots(20, 3), 1e-5)

    def test_several_blocks_of_one_adapter_beside_small_groups(self) -> None:
        layer = lora_pool.make_layer(32, (16, 16), [(8, 8)] * 4, torch.float32, device=DEVICE)
        sizes = {-1: 15, 0: 33, 1: 1, 2: 16, 3: 31}
        slots = torch.tensor([slot for slot, size in sizes.items() for _ in range(size)], device=DEVICE)
        for seed in range(3):
            order = torch.randperm(slots.size(0), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
            check(layer, slots[order], 1e-5)

    def test_groups_of_all_sizes(self) -> None:
        """Every token is found whatever the groups' sizes are, up to all of one group."""
        generator = torch.Generator().manual_seed(0)
        layer = lora_pool.make_layer(16, (16,), [(1,)] * 7, torch.float32, device=DEVICE)
        for tokens in (1, 15, 16, 17, 32, 64, 65):
            weights = torch.rand(8, generator=generator) ** 4
            slots = torch.multinomial(weights, tokens, True, generator=generator) - 1
            check(layer, slots.to(DEVICE), 1e-5)
            check(layer, torch.full((tokens,), 6, device=DEVICE), 1e-5)

    @each_kind
    def test_no_adapter_in_the_step(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The op returns before any kernel; and a replayed graph, which runs them all the same, changes nothing."""
        from engine_patch.kernels import op

        layer = small(kind)
        y, x = lora_pool.inputs(layer, 20)
        before = y.clone()
        step = lora_pool.Step(layer, torch.full((20,), -1, device=DEVICE))
        with monkeypatch.context() as patched:
            patched.setattr(op, "shrink", None)
            lora_pool.add(y, x, step)
        step.shared.linear = step.shared.streams = True
        step.shared.num_adapted = step.shared.num_blocks = 4
        lora_pool.add(y, x, step)
        assert torch.equal(y, before)

    @each_kind
    def test_adapters_without_such_a_part_launch_nothing(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from engine_patch.kernels import op

        layer = small(kind)
        y, x = lora_pool.inputs(layer, 3)
        step = lora_pool.Step(layer, torch.zeros(3, dtype=torch.int64, device=DEVICE))
        place = Place(0, 0, linear=kind == "stream", streams=kind == "linear")
        step.set_places((1, 1, 1), {1: place})
        monkeypatch.setattr(op, "shrink", None)
        lora_pool.add(y, x, step)

    @each_kind
    def test_an_adapter_lies_where_its_page_is(self, kind: str) -> None:
        """Two adapters of one kind, the second two pages behind the first."""
        layer, pages = small(kind), 2
        shift = pages * PAGE_BYTES // layer.pool.element_size()
        other = small(kind).pool.flip(0).nan_to_num()
        pool = torch.cat([layer.pool, torch.full((shift - len(layer.pool),), float("nan"), device=DEVICE), other])
        y, x = lora_pool.inputs(layer, 6)
        expected = y.clone()
        for rows, own in ((slice(0, 2), layer.pool), (slice(3, 6), other)):
            count = rows.stop - rows.start
            lora_pool.add_reference(
                expected[rows], x[rows], replace(layer, pool=own), torch.zeros(count, dtype=torch.int64, device=DEVICE)
            )
        step = lora_pool.Step(replace(layer, pool=pool), torch.full((6,), -1, device=DEVICE))
        here = Place(0, 0, linear=True, streams=True)
        step.set_places((7, 7, 0, 9, 9, 9), {7: here, 9: here._replace(page=pages)})
        lora_pool.add(y, x, step)
        assert torch.allclose(y, expected, atol=1e-5)

    @each_kind
    def test_a_step_smaller_than_the_captured_graph(self, kind: str) -> None:
        layer = small(kind)
        slots = draw_slots(20, 2)
        y, x = lora_pool.inputs(layer, 48)
        before, expected = y.clone(), y.clone()
        padded = torch.cat([slots, torch.full((28,), -1, device=DEVICE)])
        lora_pool.add_reference(expected, x, layer, padded)
        lora_pool.add(y, x, lora_pool.Step(layer, slots, max_tokens=48))
        assert torch.allclose(y, expected, atol=1e-5)
        assert torch.equal(y[20:], before[20:])

    @each_kind
    def test_the_wrapper(self, kind: str) -> None:
        """Through upstream's interface, with x and y as views of wider tensors, and in linear layers a leading dimension of 1."""
        layer, slots = small(kind), draw_slots(20, 2)
        wrapped = lora_pool.Wrapped(layer, slots)
        y, x = lora_pool.inputs(layer, 20)
        expected = y.clone()
        lora_pool.add_reference(expected, x, layer, slots)
        wide = torch.zeros(20, 50, device=DEVICE)
        wide[:, :40] = y
        pairs = [(wide[:, :40], torch.cat([x, x], 1)[:, : layer.in_features])]
        if kind == "linear":
            pairs.append((y.unsqueeze(0), x.unsqueeze(0)))
        for out, given in pairs:
            wrapped(out, given)
            assert torch.allclose(out.view(20, 40), expected, atol=1e-5)
        assert not wide[:, 40:].any()

    def test_a_stream_that_no_adapter_adapts(self) -> None:
        layer = small("stream")
        hidden, residual = lora_pool.inputs(layer, 20)
        before = hidden.clone()
        lora_pool.Wrapped(layer, draw_slots(20, 2)).wrapper.add_intervention(hidden, residual, (), ())
        assert torch.equal(hidden, before)

    @each_kind
    def test_the_wrapper_compiled(self, kind: str) -> None:
        lora_pool.check_compiled(small(kind), "aot_eager")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("tokens", [1, 37, 600])
    def test_the_activation_adds_what_the_layer_would(self, tokens: int, dtype: torch.dtype) -> None:
        """Tokens with and without adapters, and adapters of one slice alone or of none."""
        ranks = [(1, 1), (4, 0), (0, 0), (0, 20), (70, 16)]
        layer = lora_pool.make_layer(75, (70, 70), ranks, dtype, device=DEVICE)
        slots = draw_slots(tokens, len(ranks))
        y, x = lora_pool.inputs(layer, tokens)
        before, expected = y.clone(), y.clone()
        lora_pool.add_reference(expected, x, layer, slots)
        expected = silu_and_mul_reference(expected)
        out = lora_pool.add_silu_and_mul(y, x, lora_pool.Step(layer, slots))
        tolerance = 1e-5 if dtype == torch.float32 else 4e-3
        assert (out - expected).abs().max().item() <= tolerance * expected.abs().max().item()
        assert torch.equal(y, before)
        assert not torch.allclose(out, silu_and_mul_reference(before), atol=1e-3)

    def test_the_activation_finds_an_adapter_where_its_page_is(self) -> None:
        layer, pages = lora_pool.make_layer(32, (24, 24), [(8, 3)], torch.float32, device=DEVICE), 2
        shift = pages * PAGE_BYTES // layer.pool.element_size()
        pool = torch.cat([torch.full((shift,), float("nan"), device=DEVICE), layer.pool])
        y, x = lora_pool.inputs(layer, 6)
        expected = y.clone()
        lora_pool.add_reference(expected, x, layer, torch.zeros(6, dtype=torch.int64, device=DEVICE))
        step = lora_pool.Step(replace(layer, pool=pool), torch.full((6,), -1, device=DEVICE))
        step.set_places((7,) * 6, {7: Place(0, pages, linear=True, streams=False)})
        out = lora_pool.add_silu_and_mul(y, x, step)
        assert torch.allclose(out, silu_and_mul_reference(expected), atol=1e-5)

    @pytest.mark.parametrize("tokens", [1, 40])
    def test_the_activation_of_a_step_without_adapters_is_the_base_model_s(self, tokens: int) -> None:
        layer = lora_pool.make_layer(32, (1500, 1500), [(8, 8)], torch.float32, device=DEVICE)
        y, x = lora_pool.inputs(layer, tokens)
        step = lora_pool.Step(layer, torch.full((tokens,), -1, device=DEVICE))
        assert torch.allclose(lora_pool.add_silu_and_mul(y, x, step), silu_and_mul_reference(y), atol=1e-6)

    def test_layers_end_with_their_engine(self) -> None:
        """The ops do not keep an engine alive that is gone."""
        layer = small("linear")
        made = Layer(Weights(layer.pool, layer.table, layer.slices), Shared(100, 2, 8, False, DEVICE))
        number = made.number
        assert int(made.key) == number
        assert LAYERS[number] is made
        del made
        gc.collect()
        assert number not in LAYERS
