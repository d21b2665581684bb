"""DiReFT in the engine and in files: where it acts, what it computes, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from engine_patch import rule
from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.kernels.reference import scale_to_bits
from engine_patch.kernels.step import Place, Runs
from engine_patch.residual import block_of, decoder_blocks, is_stream, stream_of, unknown
from engine_patch.store.file import read_adapter, read_header, write_adapter
from tests.unit.tiny_llama import assert_same

BASE = BaseFingerprint(model_type="llama", hidden_size=16)


def lora(rank: int = 2) -> LowRankPair:
    return LowRankPair(torch.randn(rank, 16), torch.randn(16, rank), 0.5)


def direft(rank: int = 3, width: int = 16) -> LowRankPair:
    return LowRankPair(torch.randn(rank, width), torch.randn(width, rank), 1.0, torch.randn(rank))


def test_names_of_streams() -> None:
    assert stream_of("model.layers.3") == "model.layers.3.residual"
    assert block_of(stream_of("model.layers.3")) == "model.layers.3"
    assert is_stream("model.layers.3.residual")
    assert not is_stream("model.layers.3.mlp.up_proj")


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("lorap", {"lora"}),
        ("lora", {"lora"}),
        ("direftp", {"direft"}),
        ("direft", {"direft"}),
        ("lorap+direftp", {"lora", "direft"}),
        ("lora+direft", {"lora", "direft"}),
    ],
)
def test_what_methods_are_made_of(method: str, parts: set[str]) -> None:
    assert rule.parts(method) == parts
    assert rule.is_prefill_only(method) == ("p" in method)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_file_keeps_every_bit_and_tells_the_method(tmp_path: Path, dtype: str) -> None:
    pairs = {"model.layers.10.residual": direft(), "model.layers.2.residual": direft(5)}
    pairs |= {"model.layers.2.mlp.up_proj": lora(7)}
    adapter = Adapter("lorap+direftp", BASE, pairs).to(dtype)
    header = write_adapter(tmp_path / "a.preft", adapter)
    assert_same(adapter, read_adapter(tmp_path / "a.preft"))
    assert (read_header(tmp_path / "a.preft").method, header.rank) == ("lorap+direftp", 7)


def test_the_stream_lies_behind_its_layer_with_the_bias_behind_w1(tmp_path: Path) -> None:
    first, down, second = direft(), lora(), direft()
    pairs = {"1.residual": second, "1.mlp.down_proj": down, "0.residual": first}
    adapter = Adapter("lora+direft", BASE, {f"model.layers.{name}": pair for name, pair in pairs.items()})
    write_adapter(tmp_path / "a.preft", adapter)
    with safe_open(tmp_path / "a.preft", "pt") as file:
        run = file.get_tensor("pages").view(-1)
    expected = [first.a, first.bias, torch.zeros(13), first.b.T, down.a, down.b.T, second.a, second.bias]
    flat = torch.cat([part.reshape(-1) for part in expected if part is not None])
    assert torch.equal(run[: flat.numel()], flat)


def test_the_bias_counts_for_the_digest() -> None:
    pair = direft()
    digests = {Adapter("direftp", BASE, {"m.layers.0.residual": one}).digest() for one in (pair, moved(pair))}
    assert len(digests) == 2


def moved(pair: LowRankPair) -> LowRankPair:
    assert pair.bias is not None
    return LowRankPair(pair.a, pair.b, pair.scaling, pair.bias + 1)


R = "model.layers.0.residual"


@pytest.mark.parametrize(
    ("pairs", "method", "message"),
    [
        ({R: direft()}, "lorap", "holds no LoRA weights"),
        ({"q": lora()}, "direftp", "holds no DiReFT interventions"),
        ({"q": lora()}, "lorap+direftp", "holds no DiReFT interventions"),
        ({"q": lora(), R: direft()}, "lorap", r"holds DiReFT interventions, which a lorap adapter has not"),
        ({"q": lora(), R: direft()}, "direft", r"holds LoRA weights, which a direft adapter has not"),
        ({R: lora()}, "direftp", r"residual: W1 has shape \[2, 16\], W2 \[2, 16\], b None"),
        ({R: LowRankPair(torch.ones(2, 16), torch.ones(16, 2), 2.0, torch.ones(2))}, "direftp", "scaling is 2.0"),
        ({R: LowRankPair(torch.ones(2, 16), torch.ones(8, 2), 1.0, torch.ones(2))}, "direftp", r"W2 \[2, 8\]"),
        ({R: LowRankPair(torch.ones(2, 16), torch.ones(16, 2), 1.0, torch.ones(3))}, "direftp", r"b \[3\]"),
        ({R: LowRankPair(torch.ones(2, 16), torch.ones(16, 2), 1.0, torch.ones(2).half())}, "direftp", "float16"),
        ({"q": direft()}, "lorap", "and no bias"),
    ],
)
def test_adapters_that_cannot_be(pairs: dict[str, LowRankPair], method: str, message: str) -> None:
    with pytest.raises(PreftError, match=message):
        Adapter(method, BASE, pairs)


def tiny(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    if kind == "gpt2":
        sizes = {"n_layer": 3, "n_embd": 16, "n_head": 2}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=8, **sizes))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_decoder_blocks_are_found_by_name(kind: str) -> None:
    model = tiny(kind)
    blocks = decoder_blocks(model, 3)
    assert list(blocks) == [f"model.layers.{i}" for i in range(3)]
    assert list(blocks.values()) == list(model.model.layers)
    assert decoder_blocks(model, 4) == {}


def test_what_is_no_plain_list_of_decoder_blocks_has_none() -> None:
    assert decoder_blocks(tiny("gpt2"), 3) == {}
    towers = nn.ModuleDict({name: nn.ModuleDict({"layers": nn.ModuleList([nn.Identity()])}) for name in "ab"})
    assert decoder_blocks(towers, 1) == {}  # which of both?


def test_why_a_model_has_no_streams_names_its_architecture_or_what_is_odd_about_it() -> None:
    assert "architecture 'gemma' is not known (known: llama, qwen2, qwen3)" in unknown("gemma")
    assert "of a 'llama' model it is known only where" in unknown("llama")


streams = pytest.importorskip("engine_patch.pool.streams")


class LlamaDecoderLayer(nn.Module):
    """Stands for vLLM's."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.clone(), 2 * x


class OtherLayer(LlamaDecoderLayer):
    def forward(self, x: torch.Tensor) -> Any:
        return x


class Punica:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.Tensor, ...]] = []

    def add_intervention(self, hidden: torch.Tensor, residual: torch.Tensor, *stacked: Any) -> None:
        self.asked.append((hidden, residual, *stacked))


def manager(layer: type[nn.Module], model_type: str, count: int = 2) -> tuple[Any, Punica]:
    model, punica = nn.Module(), Punica()
    model.layers = nn.ModuleList([layer() for _ in range(count)])
    model.config = SimpleNamespace(model_type=model_type, hidden_size=4, num_hidden_layers=2)
    return SimpleNamespace(model=model, _get_punica_wrapper=lambda name: punica), punica


def test_every_block_of_a_known_architecture_hands_over_hidden_and_residual() -> None:
    found, punica = manager(LlamaDecoderLayer, "llama")
    hooked = streams.hook_streams(found, declared=False)
    assert list(hooked) == ["layers.0.residual", "layers.1.residual"]
    hooked["layers.0.residual"].lora_a_stacked = (torch.zeros(1),)
    x = torch.ones(3, 4)
    for block in found.model.layers:
        block(x)
    assert [(one[0].sum(), one[1].sum(), len(one[2])) for one in punica.asked] == [(12, 24, 1), (12, 24, 0)]


@pytest.mark.parametrize(
    ("layer", "model_type"), [(OtherLayer, "llama"), (LlamaDecoderLayer, "gemma"), (OtherLayer, "gemma")]
)
def test_an_unknown_architecture_has_no_streams_unless_declared(layer: type[nn.Module], model_type: str) -> None:
    assert streams.hook_streams(manager(layer, model_type)[0], declared=False) == {}
    assert len(streams.hook_streams(manager(layer, model_type)[0], declared=True)) == 2


def test_an_engine_starts_whatever_its_config_looks_like() -> None:
    """Base models without a number of layers, or with one in the part of their config that is about text."""
    found, _ = manager(LlamaDecoderLayer, "llama")
    text = found.model.config
    found.model.config = SimpleNamespace(get_text_config=lambda: text)
    assert len(streams.hook_streams(found, declared=False)) == 2
    found, _ = manager(LlamaDecoderLayer, "llama")
    found.model.config = SimpleNamespace(model_type="odd")
    assert streams.hook_streams(found, declared=False) == {}


def test_a_declaration_that_is_not_true_ends_the_start() -> None:
    found, _ = manager(OtherLayer, "gemma")
    streams.hook_streams(found, declared=True)
    with pytest.raises(PreftError, match=r"OtherLayer does not return \(hidden, residual\)"):
        found.model.layers[0](torch.ones(3, 4))
    with pytest.raises(PreftError, match="has no list of decoder blocks"):
        streams.hook_streams(manager(OtherLayer, "gemma", count=1)[0], declared=True)


def test_a_decoder_that_was_changed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_patch import contract

    (first, *_) = contract.DECODER_SYMBOLS
    changed = contract.Symbol(first.module, first.name, "0" * 16, first.why)
    monkeypatch.setattr(contract, "DECODER_SYMBOLS", (changed,))
    with pytest.raises(PreftError, match=r"differ from what was tested: .*LlamaDecoderLayer\.forward"):
        streams.hook_streams(manager(LlamaDecoderLayer, "llama")[0], declared=False)


kernels = pytest.importorskip("engine_patch.kernels.cpu", reason="needs vLLM")


@pytest.mark.parametrize("seed", range(5))
def test_cpu_equals_the_formula_token_by_token(seed: int) -> None:
    """Base rows, adapters without an intervention here, each its own rank."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width, tokens, kinds = 12, 23, {11: 0, 13: 2}
    wrapper = kernels.SegmentPunicaWrapper(max_num_batched_tokens=64, max_batches=2, device="cpu")
    ids = [rng.choice([0, 11, 13]) for _ in range(tokens)]
    places = {id_: Place(kind, 0, linear=False, streams=True) for id_, kind in kinds.items()}
    wrapper.begin_step(Runs.of(tuple(ids)), places)
    pool, table = torch.randn(2000), torch.zeros(3, 1, 4, dtype=torch.int64)
    for slot in (0, 2):
        rank = rng.choice((0, 1, 5, 8))
        table[slot, 0] = torch.tensor([rng.randrange(900), rng.randrange(900), rank, scale_to_bits(1.0)])
    hidden, residual = torch.randn(tokens, width), torch.randn(tokens, width)
    before = hidden.clone(), residual.clone()
    wrapper.add_intervention(hidden, residual, (pool,), (table, torch.tensor([[0, width]])))
    assert torch.equal(residual, before[1])
    for token, id_ in enumerate(ids):
        a, b, rank, _ = table[kinds[id_], 0].tolist() if id_ else (0, 0, 0, 0)
        if rank == 0:
            assert torch.equal(hidden[token], before[0][token])
            continue
        w1, bias = pool[a : a + rank * width].view(rank, width), pool[a + rank * width : a + rank * width + rank]
        w2, h = pool[b : b + rank * width].view(rank, width), (before[0] + before[1])[token].double()
        delta = w2.double().T @ (w1.double() @ h + bias.double())
        assert torch.allclose(hidden[token].double(), before[0][token].double() + delta, atol=1e-4)


def test_a_step_without_adapted_tokens_reads_nothing() -> None:
    wrapper = kernels.SegmentPunicaWrapper(max_num_batched_tokens=64, max_batches=2, device="cpu")
    wrapper.begin_step(Runs.of((0, 0)), {})
    wrapper.add_intervention(None, None, (torch.ones(1),), (None, None))


def test_a_step_without_adapted_tokens_runs_the_base_model_s_layers_and_not_their_wrappers() -> None:
    wrapper = kernels.SegmentPunicaWrapper(max_num_batched_tokens=64, max_batches=2, device="cpu")
    base = SimpleNamespace(forward=lambda x: ("base", x))
    layer = SimpleNamespace(punica_wrapper=wrapper, base_layer=base, forward=lambda x: ("adapted", x))
    kernels.bypass(layer)
    for ids, expected in (((0, 0), "base"), ((0, 7), "adapted"), ((0, 0), "base")):
        wrapper.begin_step(Runs.of(ids), {7: Place(0, 0, linear=True, streams=True)})
        assert layer.forward(3) == (expected, 3)
