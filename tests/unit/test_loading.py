"""What a worker refuses to load."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from engine_patch.adapter import Adapter, LoraPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.loading import check_fits, content, read_checked, require_same_content
from engine_patch.ref import AdapterRef, parse_ref
from engine_patch.store.file import write_adapter
from tests.unit.scheduling import adapter as request_for

CONFIG = SimpleNamespace(hidden_size=4, num_hidden_layers=1, vocab_size=8)
LINEAR = {"input_size": 4, "output_size": 4}
HEADS = {
    "total_num_kv_heads": 1,
    "head_size": 2,
    "output_sizes": [4, 4, 4],
}  # as on two devices: each holds the one head
LAYER = "model.layers.0.self_attn"


def adapter(*modules: str, rank: int = 2) -> Adapter:
    """A prefill-only adapter on these modules."""
    pairs = {name: LoraPair(torch.randn(rank, 4), torch.randn(4, rank), 1.0) for name in modules}
    return Adapter("lorap", BaseFingerprint(hidden_size=4), pairs)


def manager(limit: int = 8) -> Any:
    """The parts of vLLM's worker manager that say what it can hold: one fused layer and one plain one."""
    inner = SimpleNamespace(
        model=SimpleNamespace(config=CONFIG),
        modules={
            f"{LAYER}.qkv_proj": SimpleNamespace(base_layer=SimpleNamespace(**LINEAR, total_num_heads=2, **HEADS)),
            f"{LAYER}.o_proj": SimpleNamespace(base_layer=SimpleNamespace(**LINEAR)),
            "lm_head": SimpleNamespace(base_layer=SimpleNamespace()),
        },
        packed_modules={f"{LAYER}.qkv_proj": [f"{LAYER}.q_proj", f"{LAYER}.k_proj", f"{LAYER}.v_proj"]},
    )
    return SimpleNamespace(_adapter_manager=inner, lora_config=SimpleNamespace(max_lora_rank=limit))


REF = AdapterRef(Path("/store/x.preft"), "lorap", "d")


def test_modules_of_fused_and_of_plain_layers_fit() -> None:
    check_fits(adapter(f"{LAYER}.q_proj", f"{LAYER}.o_proj"), REF, manager())


@pytest.mark.parametrize("module", ["model.layers.9.self_attn.q_proj", "transformer.h.0.attn.c_attn", "lm_head"])
def test_an_adapter_whose_names_match_no_module_is_refused(module: str) -> None:
    """cases 18: a stock server would answer as the base model (vllm 34186)."""
    with pytest.raises(PreftError, match=f"adapts modules that this engine does not have: {module}"):
        check_fits(adapter(f"{LAYER}.q_proj", module), REF, manager())


@pytest.mark.parametrize(
    ("module", "width", "out"),
    [("q_proj", 6, 4), ("q_proj", 2, 4), ("q_proj", 4, 2), ("k_proj", 4, 4), ("o_proj", 4, 6)],
)
def test_tensors_of_another_size_are_refused_also_where_vllm_would_pad_them(module: str, width: int, out: int) -> None:
    """Smaller ones fit into a slot, and would answer with a part of the weights."""
    wrong = adapter(f"{LAYER}.q_proj")
    wrong.loras[f"{LAYER}.{module}"] = LoraPair(torch.randn(2, width), torch.randn(out, 2), 1.0)
    with pytest.raises(PreftError, match=f"{module} goes from {width} to {out} features there"):
        check_fits(wrong, REF, manager())


def test_key_heads_that_every_device_holds_count_once() -> None:
    fits = adapter(f"{LAYER}.q_proj")
    fits.loras[f"{LAYER}.k_proj"] = LoraPair(torch.randn(2, 4), torch.randn(2, 2), 1.0)
    check_fits(fits, REF, manager())


def test_a_rank_above_the_limit_and_another_base_are_refused() -> None:
    with pytest.raises(PreftError, match="has rank 16, this server holds up to 8"):
        check_fits(adapter(f"{LAYER}.q_proj", rank=16), REF, manager())
    other = dataclasses.replace(adapter(f"{LAYER}.q_proj"), base=BaseFingerprint(hidden_size=5))
    with pytest.raises(PreftError, match="belongs to another base model"):
        check_fits(other, REF, manager())


def test_a_file_that_holds_something_else_by_now_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.preft"
    write_adapter(file, adapter(f"{LAYER}.q_proj"))
    with pytest.raises(PreftError, match="was replaced while a request for its former content was waiting"):
        read_checked(AdapterRef(file, "lorap", "another digest"))


def test_an_id_stands_for_one_content() -> None:
    first, renamed = request_for("a", id_=5), request_for("a", name="b", id_=5)
    loaded = {5: content(parse_ref(first.lora_path))}
    require_same_content(loaded, first)
    require_same_content(loaded, renamed)
    for other in (
        request_for("c", id_=5),
        request_for("a", "lora", id_=5),
        SimpleNamespace(lora_int_id=5, lora_path="/peft", lora_name="p"),
    ):
        with pytest.raises(PreftError, match="adapter id 5 stands for another adapter's weights"):
            require_same_content(loaded, other)
    with pytest.raises(PreftError, match="adapter id 6"):
        require_same_content({6: None}, request_for("a", id_=6))  # 6 is a stock adapter's
