"""What an engine can serve is asked of vLLM's own layers, and what it cannot is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.pool import share as share_module
from engine_patch.pool.layers import EngineLayers, Slice, part_shares
from engine_patch.pool.limits import Limits, with_room_ahead
from engine_patch.pool.share import Sharer, table_rows
from engine_patch.store.file import encode, read_header, write_adapter
from engine_patch.store.format import Header
from engine_patch.store.pages import views

CONFIG = SimpleNamespace(model_type="gpt2", hidden_size=4, num_hidden_layers=1, vocab_size=8)
LINEAR = {"input_size": 4, "output_size": 4}
HEADS = {
    "total_num_kv_heads": 1,
    "head_size": 2,
    "output_sizes": [4, 4, 4],
}  # as on two devices: each holds the one head
LAYER = "model.layers.0.self_attn"


def wrapped(tp_size: int = 1, n_slices: int = 1, **base: Any) -> Any:
    return SimpleNamespace(
        base_layer=SimpleNamespace(**base), tp_size=tp_size, n_slices=n_slices, punica_wrapper="kernels"
    )


def engine() -> tuple[EngineLayers, Limits]:
    """The parts of vLLM's adapter manager that say what it can hold: one fused layer and one plain one."""
    manager = SimpleNamespace(
        model=SimpleNamespace(config=CONFIG, named_modules=list),
        modules={
            f"{LAYER}.qkv_proj": wrapped(n_slices=3, **LINEAR, total_num_heads=2, **HEADS),
            f"{LAYER}.o_proj": wrapped(**LINEAR),
            "lm_head": wrapped(),
        },
        supports_mm=False,
        _get_punica_wrapper=lambda name: "kernels",
        packed_modules={f"{LAYER}.qkv_proj": [f"{LAYER}.q_proj", f"{LAYER}.k_proj", f"{LAYER}.v_proj"]},
    )
    layers = EngineLayers.of(manager)
    limits = Limits(
        base=layers.base.to_dict(),
        max_rank=8,
        modules=layers.sizes(),
        itemsize=4,
        device_bytes=1 << 20,
        host_bytes=1 << 20,
    )
    return layers, limits


def adapter(*modules: str, rank: int = 2) -> Adapter:
    """A prefill-only adapter on these modules."""
    pairs = {name: LowRankPair(torch.randn(rank, 4), torch.randn(4, rank), 1.0) for name in modules}
    return Adapter("lorap", BaseFingerprint(hidden_size=4), pairs)


def header(made: Adapter) -> Header:
    return encode(made)[0]


def check(made: Adapter) -> None:
    engine()[1].check(header(made), "x")


def test_modules_of_fused_and_of_plain_layers_fit() -> None:
    check(adapter(f"{LAYER}.q_proj", f"{LAYER}.o_proj"))


@pytest.mark.parametrize("module", ["model.layers.9.self_attn.q_proj", "transformer.h.0.attn.c_attn", "lm_head"])
def test_an_adapter_whose_names_match_no_module_is_refused(module: str) -> None:
    """cases 18: a stock server would answer as the base model (vllm 34186)."""
    with pytest.raises(PreftError, match=f"adapts modules that this engine does not have: {module}"):
        check(adapter(f"{LAYER}.q_proj", module))


@pytest.mark.parametrize(
    ("module", "width", "out"),
    [("q_proj", 6, 4), ("q_proj", 2, 4), ("q_proj", 4, 2), ("k_proj", 4, 4), ("o_proj", 4, 6)],
)
def test_tensors_of_another_size_are_refused(module: str, width: int, out: int) -> None:
    wrong = adapter(f"{LAYER}.q_proj")
    wrong.pairs[f"{LAYER}.{module}"] = LowRankPair(torch.randn(2, width), torch.randn(out, 2), 1.0)
    with pytest.raises(PreftError, match=f"{module} goes from {width} to {out} features there"):
        check(wrong)


def test_key_heads_that_every_device_holds_count_once() -> None:
    fits = adapter(f"{LAYER}.q_proj")
    fits.pairs[f"{LAYER}.k_proj"] = LowRankPair(torch.randn(2, 4), torch.randn(2, 2), 1.0)
    check(fits)


def test_an_intervention_where_no_stream_is_known_is_refused_by_the_architecture_s_name() -> None:
    pair = LowRankPair(torch.randn(2, 4), torch.randn(4, 2), 1.0, torch.randn(2))
    made = Adapter("direftp", BaseFingerprint(), {"model.layers.0.residual": pair})
    with pytest.raises(
        PreftError, match=r"x cannot be served: .*architecture 'gpt2' is not known \(known: llama, qwen2"
    ):
        check(made)


def test_a_rank_above_the_limit_and_another_base_are_refused() -> None:
    with pytest.raises(PreftError, match="has rank 16, this server holds up to 8"):
        check(adapter(f"{LAYER}.q_proj", rank=16))
    other = dataclasses.replace(adapter(f"{LAYER}.q_proj"), base=BaseFingerprint(hidden_size=5))
    with pytest.raises(PreftError, match="belongs to another base model"):
        check(other)


@pytest.mark.parametrize("pool", ["gpu_pool", "host_pool"])
def test_an_adapter_larger_than_a_pool_is_refused_with_both_sizes(pool: str) -> None:
    _, limits = engine()
    small = limits.model_copy(update={"device_bytes" if pool == "gpu_pool" else "host_bytes": 4000})
    with pytest.raises(PreftError, match=rf"x takes 4096 bytes, and serve\.{pool} has 4000; raise it"):
        small.check(header(adapter(f"{LAYER}.q_proj")), "x")


class Columns:
    """A fused column-parallel layer on rank 1 of 2, with a key head that both ranks hold: sliced as vLLM slices it."""

    tp_size, n_slices = 2, 3

    def slice_lora_a(self, a: list[torch.Tensor]) -> list[torch.Tensor]:
        return a

    def slice_lora_b(self, b: list[torch.Tensor]) -> list[torch.Tensor]:
        return [b[0][4:8], b[1], b[2]]


class Rows:
    """A row-parallel layer on rank 1 of 2."""

    tp_size, n_slices = 2, 1

    def slice_lora_a(self, a: torch.Tensor) -> torch.Tensor:
        return a[:, 3:6]

    def slice_lora_b(self, b: torch.Tensor) -> torch.Tensor:
        return b


class Merged(Rows):
    """A layer on rank 1 of 2 whose one B holds two."""

    def slice_lora_a(self, a: torch.Tensor) -> torch.Tensor:
        return a

    def slice_lora_b(self, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([b[2:4], b[6:8]])


def test_a_share_is_what_vllms_slicing_leaves() -> None:
    columns = part_shares(Columns(), [(4, 8), (4, 2), (4, 2)])
    assert [rows for _, rows in columns] == [slice(4, 8), None, None]
    assert all(features is None for features, _ in columns)
    ((features, rows),) = part_shares(Rows(), [(6, 4)])
    assert (features, rows) == (slice(3, 6), None)
    ((features, rows),) = part_shares(Merged(), [(6, 8)])
    assert features is None
    assert isinstance(rows, torch.Tensor)
    assert rows.tolist() == [2, 3, 6, 7]
    assert Slice("model.layers.0.mlp.gate_up_proj", 6, 8, features, rows).local_out == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [0, 1 << 20], ids=["too large to keep", "kept"])
def test_a_worker_loads_its_share_of_every_module(
    tmp_path: Path, dtype: torch.dtype, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of a row-parallel and a column-parallel layer: together they hold the whole, each its own part.

    The residual stream is on both: so are interventions.
    """
    monkeypatch.setattr(share_module, "SCRATCH_KEPT", kept)
    torch.manual_seed(0)
    made = Adapter(
        "lorap+direftp",
        BaseFingerprint(),
        {
            "model.layers.0.residual": LowRankPair(torch.randn(3, 5), torch.randn(5, 3), 1.0, torch.randn(3)),
            "model.layers.0.self_attn.o_proj": LowRankPair(torch.randn(3, 6), torch.randn(4, 3), 2.0),
            "model.layers.0.mlp.up_proj": LowRankPair(torch.randn(5, 4), torch.randn(8, 5), 0.5),
        },
    )
    path = tmp_path / "a.preft"
    write_adapter(path, made)
    found = read_header(path)
    before = tmp_path / "before.preft"
    other = write_adapter(before, dataclasses.replace(made, pairs={n: p.map(torch.neg) for n, p in made.pairs.items()}))
    for rank in (0, 1):
        half = slice(3 * rank, 3 * rank + 3)
        parts = [
            Slice("model.layers.0.self_attn.o_proj", 6, 4, half, None),
            Slice("model.layers.0.mlp.up_proj", 4, 8, None, torch.arange(4) + 4 * rank),
            Slice("model.layers.0.residual", 5, 5, None, None),
        ]
        layers = EngineLayers([(None, [part]) for part in parts], BaseFingerprint())
        limits = Limits(
            base={}, max_rank=8, modules=layers.sizes(), itemsize=dtype.itemsize, device_bytes=9999, host_bytes=9999
        )
        sharer = Sharer(layers, limits, dtype)
        share = sharer.share(found)
        assert not share.plain
        into = torch.zeros(share.num_bytes, dtype=torch.uint8)
        # What this thread has read before lies where the file is read to now.
        sharer.load(before, other, torch.zeros(sharer.share(other).num_bytes, dtype=torch.uint8), map)
        sharer.load(path, found, into, map)
        found_in = {name: views(into.view(dtype), block) for name, block in share.layout.blocks.items()}
        w1, w2, bias = found_in["model.layers.0.residual"]
        o_a, o_b, _ = found_in["model.layers.0.self_attn.o_proj"]
        up_a, up_b, _ = found_in["model.layers.0.mlp.up_proj"]
        direft, o, up = made.to(str(dtype)[6:]).pairs.values()
        assert torch.equal(w1, direft.a)
        assert torch.equal(w2, direft.b.t())
        assert bias is not None
        assert direft.bias is not None
        assert torch.equal(bias, direft.bias)
        assert torch.equal(o_a, o.a[:, half])
        assert torch.equal(o_b, o.b.t())
        assert torch.equal(up_a, up.a)
        assert torch.equal(up_b, up.b[4 * rank : 4 * rank + 4].t())


def test_modules_that_an_adapter_leaves_out_have_rank_zero_in_the_table() -> None:
    layers, limits = engine()
    rows = table_rows(limits.layout(header(adapter(f"{LAYER}.k_proj")).groups), layers.slices)
    assert rows[:, 2].tolist() == [0, 2, 0, 0]


def test_the_device_pool_has_room_ahead_up_to_four_gib() -> None:
    assert [with_room_ahead(size << 30) >> 30 for size in (1, 4, 5, 50)] == [2, 8, 9, 54]
