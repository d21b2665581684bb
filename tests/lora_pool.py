"""Random adapters in a pool, and random steps: for the tests and measurements of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine_patch.kernels.reference import add_intervention_reference, add_lora_reference, scale_to_bits
from engine_patch.kernels.step import Place, Runs

ALIGNMENT = 16
"""Offsets in a pool are multiples of so many elements."""


@dataclass(frozen=True)
class Layer:
    """One layer's share of a pool: a fused linear layer, or a residual stream.

    Attributes:
        pool: `[num_elements]`.
        table: int64 `[slots, n_slices, 4]`, a view of a table of more slices.
        slices: int32 `[n_slices, 2]`.
        in_features, widths, max_rank: sizes.
        is_stream: whether the adapters are interventions, with a bias behind each A.
    """

    pool: torch.Tensor
    table: torch.Tensor
    slices: torch.Tensor
    in_features: int
    widths: tuple[int, ...]
    max_rank: int
    is_stream: bool = False

    def on(self, device: str) -> Layer:
        """The same on a device; the table stays a view."""
        table = torch.zeros(self.table.size(0), self.table.size(1) + 3, 4, dtype=torch.int64, device=device)
        table[:, 1:-2] = self.table.to(device)
        return replace(self, pool=self.pool.to(device), table=table[:, 1:-2], slices=self.slices.to(device))


def make_layer(
    in_features: int,
    widths: Sequence[int],
    ranks: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    skip: int = 0,
    is_stream: bool = False,
    device: str = "cpu",
) -> Layer:
    """A layer whose adapter in slot s has rank `ranks[s][i]` on slice i.

    Unused elements, among them the first `skip`, are NaN, so that reading them would show. x and y of variance 1 fit the
    weights' scale: what is added is of the size of y.
    """
    generator = torch.Generator(device).manual_seed(seed)
    table = torch.zeros(len(ranks), len(widths), 4, dtype=torch.int64)
    size, weights = skip + ALIGNMENT, []
    for slot, of_slices in enumerate(ranks):
        for index, (rank, width) in enumerate(zip(of_slices, widths, strict=True)):
            scale = 0.5 + (slot + index) % 4
            place = []
            for columns, spread in ((in_features, in_features**-0.5), (width, max(1, rank) ** -0.5 / scale)):
                numbers = torch.randn(rank * columns, generator=generator, device=device, dtype=torch.float32) * spread
                if is_stream and not place:
                    numbers = torch.cat([numbers, torch.randn(rank, generator=generator, device=device)])
                weights.append((size, numbers.to(dtype)))
                place.append(size)
                size += -(-(numbers.numel() + 1) // ALIGNMENT) * ALIGNMENT
            table[slot, index] = torch.tensor([*place, rank, scale_to_bits(scale)])
    pool = torch.full((size,), float("nan"), dtype=dtype, device=device)
    for offset, numbers in weights:
        pool[offset : offset + numbers.numel()] = numbers
    starts = [sum(widths[:index]) for index in range(len(widths))]
    slices = torch.tensor(list(zip(starts, widths, strict=True)), dtype=torch.int32)
    max_rank = max(1, *(max(of_slices) for of_slices in ranks))
    return Layer(pool, table, slices, in_features, tuple(widths), max_rank, is_stream).on(device)


def make_stream(
    width: int, ranks: Sequence[int], dtype: torch.dtype, *, seed: int = 0, skip: int = 0, device: str = "cpu"
) -> Layer:
    """A residual stream whose adapter in slot s has rank `ranks[s]`."""
    of_slots = [(rank,) for rank in ranks]
    return make_layer(width, (width,), of_slots, dtype, seed=seed, skip=skip, is_stream=True, device=device)


def make_selecting_stream(width: int, rank: int, dtype: torch.dtype, device: str = "cpu") -> Layer:
    """A stream whose one adapter picks the first columns, so that no sum in between has two terms but for the bias.

    What is added then does not depend on the order of a sum: kernels must give every bit of the reference.
    """
    layer = make_stream(width, [rank], dtype, device=device)
    for offset in layer.table[0, 0, :2].tolist():
        layer.pool[offset : offset + rank * width] = torch.eye(rank, width, device=device).flatten()
    return layer


def by_slot(token_slots: torch.Tensor) -> tuple[tuple[int, ...], dict[int, Place]]:
    """The adapter id of every token, and where adapters are whose kind is their slot."""
    ids = (token_slots.cpu() + 1).tolist()
    return tuple(ids), {id_: Place(id_ - 1, 0, linear=True, streams=True) for id_ in set(ids) - {0}}


class Step:
    """A step of an engine that has but one layer, each adapter of which has the kind that its slot in the table stands for."""

    def __init__(self, layer: Layer, token_slots: torch.Tensor, max_tokens: int = 0) -> None:
        """See `set`; `max_tokens` is of the engine, by default as many as the step has."""
        from engine_patch.kernels import layer as kernels

        self.is_stream, device = layer.is_stream, layer.pool.device
        most, adapters = max_tokens or token_slots.size(0), layer.table.size(0)
        self.shared = kernels.Shared(most, adapters, layer.max_rank, False, device)
        self.layer = kernels.Layer(kernels.Weights(layer.pool, layer.table, layer.slices), self.shared)
        self.set(token_slots)

    def set(self, token_slots: torch.Tensor) -> None:
        """Let it be one of these tokens, int64 `[num_tokens]`, -1 for a token without an adapter."""
        self.set_places(*by_slot(token_slots))

    def set_places(self, ids: tuple[int, ...], places: dict[int, Place]) -> None:
        """The same by the adapter id of every token, and where the adapters are."""
        from engine_patch.kernels.gpu import set_step

        set_step(self.shared, Runs.of(ids), places)


def inputs(layer: Layer, num_tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random y, `[num_tokens, sum of widths]`, and x, `[num_tokens, in_features]`; of a stream, hidden and residual."""
    generator = torch.Generator(layer.pool.device).manual_seed(seed)

    def draw(columns: int) -> torch.Tensor:
        numbers = torch.randn(num_tokens, columns, generator=generator, device=layer.pool.device)
        return numbers.to(layer.pool.dtype)

    return draw(sum(layer.widths)), draw(layer.in_features)


def add(y: torch.Tensor, x: torch.Tensor, step: Step) -> None:
    """The kernels, through the custom op for such a layer; of a stream, y is hidden and x the residual."""
    from engine_patch.kernels import op

    (op.add_intervention if step.is_stream else op.add_lora)(y, x, step.layer.key)


def add_silu_and_mul(y: torch.Tensor, x: torch.Tensor, step: Step) -> torch.Tensor:
    """The activation of a gated MLP whose gate and up the layer adapts, through its custom op."""
    from engine_patch.kernels import op

    out: torch.Tensor = op.add_lora_silu_and_mul(y, x, step.layer.key)
    return out


def add_reference(y: torch.Tensor, x: torch.Tensor, layer: Layer, token_slots: torch.Tensor) -> None:
    """The same in plain PyTorch."""
    reference = add_intervention_reference if layer.is_stream else add_lora_reference
    reference(y, x, layer.pool, layer.table, layer.slices, token_slots)


class Wrapped:
    """The kernels, as the engine's layers and streams call them, in an engine that has but one."""

    def __init__(self, layer: Layer, token_slots: torch.Tensor, max_tokens: int = 64) -> None:
        """See `Step`. Upstream's initialiser needs an engine's configuration, and Triton on a GPU."""
        from engine_patch.kernels.gpu import PoolPunicaWrapper
        from engine_patch.kernels.layer import Shared

        self.wrapper = PoolPunicaWrapper.__new__(PoolPunicaWrapper)
        self.wrapper.shared = Shared(max_tokens, layer.table.size(0), layer.max_rank, False, layer.pool.device)
        self.wrapper.layers = []
        self._layer, self._stacked = layer, self.wrapper.adopt(layer.pool, layer.table, layer.slices)
        self.set(token_slots)

    def set(self, token_slots: torch.Tensor) -> None:
        """See `Step.set`."""
        ids, places = by_slot(token_slots)
        self.wrapper.begin_step(Runs.of(ids), places)

    def __call__(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if self._layer.is_stream:
            self.wrapper.add_intervention(y, x, *self._stacked)
        else:
            self.wrapper.add_lora_linear(y, x, *self._stacked, 1.0, self._layer.widths)


def check_compiled(layer: Layer, backend: str) -> None:
    """torch.compile makes one graph of it, for all numbers of tokens, and the step's metadata stay out of it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    generator = torch.Generator().manual_seed(0)
    wrapped = Wrapped(layer, torch.zeros(2, dtype=torch.int64))
    width = sum(layer.widths)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x, x], 1)[:, :width] * 2
        wrapped(y, x)
        return y + x[:, :1]

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(forward, backend=counter, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        for tokens in (20, 33, 7):
            wrapped.set(torch.randint(-1, layer.table.size(0), (tokens,), generator=generator))
            x = inputs(layer, tokens)[1]
            before = x.clone()
            torch._dynamo.mark_dynamic(x, 0)  # as vLLM does
            assert torch.equal(compiled(x), forward(before))
            assert torch.equal(x, before)
    assert counter.frame_count == 1


def untouched(layer: Layer, token_slots: torch.Tensor) -> torch.Tensor:
    """Bool `[num_tokens, sum of widths]`: the elements of y that no adapter adapts."""
    adapted = (layer.table[:, :, 2] > 0).repeat_interleave(layer.slices[:, 1].long(), dim=1)
    return ~(adapted[token_slots.clamp_min(0)] & (token_slots >= 0)[:, None])
