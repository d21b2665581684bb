"""A trainer's weights go to the pool on a GPU: their time, their bytes, and the order of what is queued."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_patch.adapter import LowRankPair
from engine_patch.live import LiveAdapter
from engine_patch.pool.tiers import AdapterTiers
from engine_patch.store.layout import PAGE_BYTES
from engine_patch.store.pages import pack
from preft_cli.config.schema import AdapterConfig
from preft_cli.methods.adapted import AdaptedModel
from tests.live import FakeEngine, make_live, present
from tests.unit import pools

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and vLLM's CUDA build"),
]

RANK = 16
LAYERS = 30
LINEAR = {
    "q_proj": ("self_attn", 576, 576),
    "k_proj": ("self_attn", 576, 192),
    "v_proj": ("self_attn", 576, 192),
    "o_proj": ("self_attn", 576, 576),
    "gate_proj": ("mlp", 576, 1536),
    "up_proj": ("mlp", 576, 1536),
    "down_proj": ("mlp", 1536, 576),
}
SHAPES = {
    f"model.layers.{layer}.{part}.{name}": (size_in, size_out)
    for layer in range(LAYERS)
    for name, (part, size_in, size_out) in LINEAR.items()
}
"""Of SmolLM2-135M: 210 linear layers."""

MOST_SECONDS = 0.005


def trained(seed: int, device: str = "cuda") -> dict[str, LowRankPair]:
    """As a trainer holds them: float32 parameters; every second B as the transpose of one."""
    generator = torch.Generator(device).manual_seed(seed)

    def parameter(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(shape, generator=generator, device=device))

    return {
        name: LowRankPair(
            parameter(RANK, size_in), parameter(RANK, size_out).t() if index % 2 else parameter(size_out, RANK), 2.0
        )
        for index, (name, (size_in, size_out)) in enumerate(SHAPES.items())
    }


def llama() -> Any:
    """A random model of these layers."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=512, tie_word_embeddings=True)
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def expected(pairs: dict[str, LowRankPair], tiers: AdapterTiers, live: LiveAdapter) -> torch.Tensor:
    """What a file of them in the engine's dtype holds, `[num_elements]`."""
    layout = tiers.device.adapters[present(live).digest].share.layout
    dtype = tiers.device.pool.dtype
    return pack({name: pair.map(lambda t: t.detach().cpu().to(dtype)) for name, pair in pairs.items()}, layout).view(-1)


def pages_of(tiers: AdapterTiers, live: LiveAdapter) -> torch.Tensor:
    """The pages of the present version, a part of the pool."""
    run = tiers.device.arena.runs[present(live).digest]
    size = PAGE_BYTES // tiers.device.pool.element_size()
    return tiers.device.pool[run.start * size : run.stop * size]


@pytest.fixture
def engine() -> FakeEngine:
    """A pool of two versions, in bfloat16."""
    layers = pools.layers(SHAPES)
    limits = pools.limits(layers, 1, 1, max_rank=RANK, itemsize=2)
    pages = limits.largest_pages()
    limits = limits.model_copy(update={"device_bytes": 2 * pages * PAGE_BYTES, "host_bytes": pages * PAGE_BYTES})
    return FakeEngine(AdapterTiers(layers, limits, 1, torch.bfloat16, torch.device("cuda")))


@pytest.fixture
def live(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> LiveAdapter:
    return make_live(engine, monkeypatch, pools.BASE)


def test_a_sync_takes_less_than_5_ms(engine: FakeEngine, live: LiveAdapter, capsys: pytest.CaptureFixture[str]) -> None:
    """With the trainer's own kernels queued before each; the first also makes the index."""
    seconds, pairs = [], [trained(seed) for seed in range(4)]
    for turn in range(40):
        for pair in pairs[turn % 4].values():
            pair.a.detach().mul_(1.01)
        version = live.sync(pairs[turn % 4])
        seconds.append(version.seconds)
    with capsys.disabled():
        print(
            f"\nsync of rank {RANK}, {len(SHAPES)} layers, {version.num_bytes / 1e6:.1f} MB: first {seconds[0] * 1e3:.1f} ms,"
            f" then {statistics.median(seconds[1:]) * 1e3:.2f} ms (most {max(seconds[1:]) * 1e3:.2f})"
        )
    assert torch.equal(pages_of(engine.tiers, live).cpu(), expected(pairs[turn % 4], engine.tiers, live))
    assert statistics.median(seconds[1:]) < MOST_SECONDS


def test_a_sync_of_a_trained_model_takes_less_than_5_ms(
    engine: FakeEngine, live: LiveAdapter, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the trainer asks for it: from PEFT's layers to the pages."""
    adapted = AdaptedModel(llama(), AdapterConfig(rank=RANK, alpha=2 * RANK), {"lora": [*LINEAR]})
    seconds = []
    for _ in range(20):
        for parameter in adapted.trainable().values():
            parameter.detach().add_(0.01)
        torch.cuda.synchronize()
        started = time.perf_counter()
        live.sync(adapted.live_pairs())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    with capsys.disabled():
        print(f"\nsync from a trained model: {statistics.median(seconds[1:]) * 1e3:.2f} ms")
    assert torch.equal(pages_of(engine.tiers, live).cpu(), expected(adapted.live_pairs(), engine.tiers, live))
    assert statistics.median(seconds[1:]) < MOST_SECONDS


def test_it_is_a_handful_of_kernels(live: LiveAdapter) -> None:
    pairs = trained(1)
    live.sync(pairs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        live.sync(pairs)
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(kernels) <= 12, [event.name for event in kernels]


def test_weights_of_the_host_reach_the_device(engine: FakeEngine, live: LiveAdapter) -> None:
    pairs = trained(1, "cpu")
    live.sync(pairs)
    assert torch.equal(pages_of(engine.tiers, live).cpu(), expected(pairs, engine.tiers, live))


def test_kernels_that_are_queued_read_what_lay_there_before(engine: FakeEngine, live: LiveAdapter) -> None:
    """On streams of the engine's, which the trainer's knows nothing of; and the trainer's weights may be on their way."""
    first, second = trained(1), trained(2)
    live.sync(first)
    old = pages_of(engine.tiers, live)
    before = old.clone()
    reading, training = torch.cuda.Stream(), torch.cuda.Stream()
    out = torch.empty_like(old)
    torch.cuda.synchronize()
    with torch.cuda.stream(reading):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        out.copy_(old)
    with torch.cuda.stream(training):
        torch.cuda._sleep(200_000_000)
        for pair in second.values():
            pair.a.detach().add_(1)
        live.sync(second)
    live.sync(second)  # lands where the first lay
    with torch.cuda.stream(reading):
        after = pages_of(engine.tiers, live).clone()
    torch.cuda.synchronize()
    assert torch.equal(out, before)
    assert torch.equal(after.cpu(), expected(second, engine.tiers, live))


def test_files_and_versions_share_a_pool(engine: FakeEngine, live: LiveAdapter, tmp_path: Any) -> None:
    """A file's copy to the device runs on a stream of its own; a sync may take its pages, and it those of a version."""
    from engine_patch.adapter import Adapter

    files = []
    for seed in range(3):
        adapter = Adapter("lorap", pools.BASE, {n: p.map(lambda t: t.detach().cpu()) for n, p in trained(seed).items()})
        files.append((pools.write(tmp_path, str(seed), adapter), adapter.to("bfloat16")))
    for turn in range(9):
        ref, adapter = files[turn % 3]
        while engine.tiers.want([], [ref.encode()], 0.01):
            pass
        pairs = trained(10 + turn)
        live.sync(pairs)
        (place,) = engine.tiers.activate([ref.encode()])
        layout = engine.tiers.device.adapters[ref.digest].share.layout
        start = place.page * PAGE_BYTES // 2
        found = engine.tiers.device.pool[start : start + layout.num_pages * layout.page_elements].cpu()
        for name, block in layout.blocks.items():
            a = found[block.a_offset : block.a_offset + RANK * block.module.in_features]
            assert torch.equal(a.view(RANK, -1), adapter.pairs[name].a), (turn, name)
        assert torch.equal(pages_of(engine.tiers, live).cpu(), expected(pairs, engine.tiers, live))
