"""PEFT folders in and out, compared with PEFT itself to the last bit."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.store import read_adapter
from preft_cli.adapters.base import BaseFacts
from preft_cli.adapters.layout import PEFT_BIN, PEFT_CONFIG, PEFT_WEIGHTS, PREFILL_CONFIG, PREFILL_WEIGHTS
from preft_cli.adapters.peft_in import load_peft
from preft_cli.adapters.peft_out import peft_config, write_peft
from preft_cli.adapters.targets import rank_and_scaling, targeted
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.run import convert
from preft_cli.errors import UserError
from preft_cli.models import BaseModel
from tests.unit import tiny_llama as tiny

Q1 = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return tiny.save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def facts(base: BaseModel) -> BaseFacts:
    return BaseFacts.of(base)


@pytest.fixture(scope="module")
def saved(base: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft") / "tone"
    tiny.save_peft(folder, base)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    copy = tmp_path / "tone"
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def edit(folder: Path, **changes: Any) -> None:
    path = folder / PEFT_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / PEFT_WEIGHTS)
    save_file(change(tensors), folder / PEFT_WEIGHTS)


VARIANTS = {
    "plain": {},
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 8, "^model.layers.0.mlp.down_proj": 2, "layers.99.q": 3},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 3, "layers.10.self_attn.q_proj": 5, "down_proj": 7},
    },
    "patterns and rslora": {"use_rslora": True, "rank_pattern": {r"layers\.1\d?\..*q_proj": 12}},
    "regex": {"target_modules": r".*layers\.(1|10)\..*\.(k|v)_proj"},
    "all-linear": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "some layers": {"layers_to_transform": [1, 10], "layers_pattern": "layers"},
    "one layer": {"layers_to_transform": 1},
    "a full name beside some layers": {
        "target_modules": ["k_proj", "model.layers.3.self_attn.q_proj"],
        "layers_to_transform": [1],
    },
    "keys match up to the end of a name only": {
        "alpha_pattern": {"layers.1": 3, "self_attn": 5, "proj": 6, "q_pro": 7}
    },
    "gaussian": {"init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_weight_change_equals_pefts_own(base: BaseModel, facts: BaseFacts, tmp_path: Path, variant: str) -> None:
    model = tiny.save_peft(tmp_path / "a", base, **VARIANTS[variant])
    adapter = load_peft(tmp_path / "a", facts).adapter
    theirs = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default")
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert adapter.pairs.keys() == theirs.keys()
    for name, pair in adapter.pairs.items():
        assert torch.equal((pair.b @ pair.a) * pair.scaling, theirs[name]), name
    assert adapter.method == "lora"


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(("saved_as", "served_as"), [(FULL, FULL), (FULL, HALF), (HALF, HALF)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_stored_weight_change_equals_pefts_own(
    base: BaseModel, tmp_path: Path, variant: str, saved_as: torch.dtype, served_as: torch.dtype
) -> None:
    """All the way: PEFT's folder, `preft convert`, the file in the store; against PEFT in the dtype that is served."""
    model = tiny.save_peft(tmp_path / "a", base, **VARIANTS[variant]).to(saved_as)
    model.save_pretrained(tmp_path / "a")
    model.to(served_as)
    dtype = str(served_as).removeprefix("torch.")
    config = PreftConfig.model_validate({"model": {"base": base.name}, "convert": {"dtype": dtype}})
    (item,) = convert([tmp_path / "a"], config, tmp_path).converted
    adapter = read_adapter(Path(item.path))
    theirs = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default")
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert (item.dtype, adapter.dtype) == (dtype, dtype)
    assert adapter.pairs.keys() == theirs.keys()
    for name, pair in adapter.pairs.items():
        assert theirs[name].dtype == served_as
        # On a CPU, PEFT computes half types in float32 and rounds once.
        ours = ((pair.b.float() @ pair.a.float()) * pair.scaling).to(served_as)
        assert torch.equal(ours, theirs[name]), name


def test_rslora_scales_by_four_once(base: BaseModel, facts: BaseFacts, tmp_path: Path) -> None:
    tiny.save_peft(tmp_path / "a", base, **VARIANTS["rslora"])
    assert {pair.scaling for pair in load_peft(tmp_path / "a", facts).adapter.pairs.values()} == {4.0}


def test_layer_one_is_not_layer_ten(base: BaseModel, facts: BaseFacts, tmp_path: Path) -> None:
    tiny.save_peft(tmp_path / "a", base, **VARIANTS["patterns"])
    loaded = load_peft(tmp_path / "a", facts)
    scaling = {n: p.scaling for n, p in loaded.adapter.pairs.items() if n.endswith("q_proj")}
    assert scaling["model.layers.1.self_attn.q_proj"] == 3 / 8
    assert scaling["model.layers.10.self_attn.q_proj"] == 5 / 4
    assert scaling["model.layers.11.self_attn.q_proj"] == 8 / 4
    assert loaded.warnings == ["rank_pattern 'layers.99.q' matches no module and does nothing"]


# PEFT expands all-linear before it asks; that one is compared through the saved adapter above.
@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - {"all-linear"}))
def test_targets_agree_with_peft(facts: BaseFacts, variant: str) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists

    config = {"target_modules": ["q_proj", "down_proj"], **VARIANTS[variant]}
    theirs = LoraConfig(**config)
    matched = {m: check_target_module_exists(theirs, m) for m in facts.shapes}
    expected = {m for m, found in matched.items() if found and not isinstance(found, _ExcludedModule)}
    assert targeted(config, facts.shapes) == expected
    assert expected


def test_bin_with_plain_tensors(base: BaseModel, facts: BaseFacts, folder: Path) -> None:
    expected = load_peft(folder, facts).adapter
    torch.save(load_file(folder / PEFT_WEIGHTS), folder / PEFT_BIN)
    (folder / PEFT_WEIGHTS).unlink()
    tiny.assert_same(expected, load_peft(folder, facts).adapter)


class Touch:
    """A pickle of this creates a file when it is loaded carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mknod, (str(self.path),))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_with_code_is_never_executed(facts: BaseFacts, folder: Path, tmp_path: Path, zipped: bool) -> None:
    (folder / PEFT_WEIGHTS).unlink()
    proof = tmp_path / "executed"
    if zipped:
        torch.save({"x": Touch(proof)}, folder / PEFT_BIN)
    else:
        (folder / PEFT_BIN).write_bytes(pickle.dumps(Touch(proof)))
    with pytest.raises(UserError, match=r"adapter_model\.bin is a pickle .* nothing in it was executed"):
        load_peft(folder, facts)
    assert not proof.exists()
    if not zipped:  # the trap itself works
        pickle.loads((folder / PEFT_BIN).read_bytes())
        assert proof.exists()


@pytest.mark.parametrize("data", [[torch.zeros(1)], {"a": {"b": torch.zeros(1)}}, {"a": 3}])
def test_bin_of_another_form(facts: BaseFacts, folder: Path, data: Any) -> None:
    (folder / PEFT_WEIGHTS).unlink()
    torch.save(data, folder / PEFT_BIN)
    with pytest.raises(UserError, match="does not hold a plain dictionary of tensors"):
        load_peft(folder, facts)


def test_truncated_bin(facts: BaseFacts, folder: Path) -> None:
    torch.save(load_file(folder / PEFT_WEIGHTS), folder / PEFT_BIN)
    (folder / PEFT_WEIGHTS).unlink()
    (folder / PEFT_BIN).write_bytes((folder / PEFT_BIN).read_bytes()[:3000])
    with pytest.raises(UserError, match="damaged"):
        load_peft(folder, facts)


def test_adapter_name_in_tensor_names(facts: BaseFacts, folder: Path) -> None:
    expected = load_peft(folder, facts).adapter
    edit_tensors(folder, lambda t: {k.replace(".weight", ".default.weight"): v for k, v in t.items()})
    tiny.assert_same(expected, load_peft(folder, facts).adapter)


def test_two_adapters_in_one_file(facts: BaseFacts, folder: Path) -> None:
    edit_tensors(folder, lambda t: {**t, **{k.replace(".weight", ".other.weight"): v.clone() for k, v in t.items()}})
    with pytest.raises(UserError, match="more than one adapter"):
        load_peft(folder, facts)


def test_one_tensor_under_two_names(facts: BaseFacts, folder: Path) -> None:
    name = f"{Q1}.lora_A.weight"
    bare = name.removeprefix("base_model.model.")
    edit_tensors(folder, lambda t: {**t, bare: t[name] * 2})
    with pytest.raises(UserError, match="are both lora_A of") as caught:
        load_peft(folder, facts)
    assert f"{name} and {bare}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "trained bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "token embeddings"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["w"]}, "bare parameters"),
        ({"use_qalora": True}, "QALoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "BD-LoRA"),
        ({"arrow_config": {"top_k": 3}}, "Arrow"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "PiSSA"),
        ({"init_lora_weights": "olora"}, "OLoRA"),
        ({"peft_type": "IA3"}, "'IA3'; only LoRA"),
        ({"peft_type": "PROMPT_TUNING"}, "'PROMPT_TUNING'; only LoRA"),
        ({"peft_type": None}, "only LoRA"),
        ({"r": 0}, "r must be at least 1"),
        ({"r": "8"}, "r must be a whole number, found '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
        ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern\.q_proj must be at least 1"),
        ({"rank_pattern": {"(": 8}}, "not a regular expression"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"target_modules": {"a": 1}}, "target_modules must be a list"),
    ],
)
def test_configs_that_cannot_be_served(facts: BaseFacts, folder: Path, changes: dict[str, Any], feature: str) -> None:
    edit(folder, **changes)
    with pytest.raises(UserError, match=feature) as error:
        load_peft(folder, facts)
    assert PEFT_CONFIG in str(error.value)


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        (f"{Q1}.lora_magnitude_vector.weight", "DoRA"),
        (f"{Q1}.lora_B.bias", "trained bias"),
        ("base_model.model.model.embed_tokens.weight", "added tokens"),
        ("base_model.model.lm_head.weight", "added tokens"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "LoRA on the embeddings"),
        ("base_model.model.model.norm.modules_to_save.weight", "modules_to_save"),
        (f"{Q1}.base_layer.weight", "base model weights"),
        ("base_model.model.something", "unknown tensor base_model.model.something"),
    ],
)
def test_foreign_tensors_are_named(facts: BaseFacts, folder: Path, name: str, feature: str) -> None:
    edit_tensors(folder, lambda t: {**t, name: torch.zeros(2)})
    with pytest.raises(UserError, match=feature):
        load_peft(folder, facts)


def without(*fragments: str) -> Any:
    return lambda tensors: {k: v for k, v in tensors.items() if not any(f in k for f in fragments)}


def renamed(old: str, new: str) -> Any:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def mapped(fragment: str, change: Any) -> Any:
    """Apply `change` to the tensors whose name holds `fragment`."""
    return lambda tensors: {name: change(t) if fragment in name else t for name, t in tensors.items()}


def halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rank 2 where the config says 4."""
    return {name: (t[:2] if "lora_A" in name else t[:, :2]).contiguous() for name, t in tensors.items()}


def with_k_proj(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A complete pair of a module that target_modules does not name."""
    k = Q1.replace("q_proj", "k_proj")
    return {**tensors, f"{k}.lora_A.weight": torch.zeros(4, 16), f"{k}.lora_B.weight": torch.zeros(8, 4)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{Q1}.lora_B"), rf"tensor {Q1}\.lora_B\.weight is missing"),
        (without("layers.1.self_attn"), r"tensors of 1 of 24 modules are missing, such as model\.layers\.1\.self_attn"),
        (without("layers.11."), r"2 of 24 modules are missing.*\(layers 0 to 10 of 0 to 11\)"),
        (without("lora"), "holds no tensors"),
        (renamed("layers.11", "layers.29"), r"adapts layer 29 .* has 12 layers"),
        (renamed("self_attn.q_proj", "attn.wq"), r"such as model\.layers\.0\.attn\.wq"),
        (renamed("model.layers", "model.decoder.layers"), "24 of 24 adapted modules do not exist"),
        (mapped(f"{Q1}.lora_A", lambda _: torch.zeros(4, 32)), "32 inputs and 16 outputs in the adapter, 16 and 16 in"),
        (halved, r"lora_A of shape \[2, 24\] .* says rank 4"),
        (mapped(Q1, lambda t: t * torch.nan), "NaN or infinite"),
        (mapped("lora_A", torch.Tensor.half), "float16 and float32"),
        (with_k_proj, "target_modules do not name"),
    ],
)
def test_tensors_that_do_not_fit(facts: BaseFacts, folder: Path, change: Any, message: str) -> None:
    edit_tensors(folder, change)
    with pytest.raises(UserError, match=message):
        load_peft(folder, facts)


def test_other_hidden_size(facts: BaseFacts, tmp_path: Path) -> None:
    other = tiny.save_base(tmp_path / "base", hidden_size=32)
    tiny.save_peft(tmp_path / "a", other)
    with pytest.raises(UserError, match=r"has 24 inputs and 32 outputs in the adapter, 24 and 16 in"):
        load_peft(tmp_path / "a", facts)


def test_fewer_layers_than_the_base(facts: BaseFacts, tmp_path: Path) -> None:
    other = tiny.save_base(tmp_path / "base", num_hidden_layers=6)
    tiny.save_peft(tmp_path / "a", other)
    with pytest.raises(UserError, match=r"layers 0 to 5 of 0 to 11"):
        load_peft(tmp_path / "a", facts)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (PEFT_CONFIG, None, r"adapter_config\.json is missing"),
        (PEFT_CONFIG, '{"r": 8, "lora', "not valid JSON"),
        (PEFT_CONFIG, "[]", "a JSON list, expected an object"),
        (PEFT_CONFIG, "\udcff", "not valid JSON"),
        (PEFT_WEIGHTS, None, r"adapter_model\.safetensors is missing"),
        (PEFT_WEIGHTS, "", "truncated or damaged"),
        (PEFT_WEIGHTS, "half", "truncated or damaged"),
    ],
)
def test_damaged_folders(facts: BaseFacts, folder: Path, file: str, content: str | None, message: str) -> None:
    path = folder / file
    if content is None:
        path.unlink()
    elif content == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=message) as error:
        load_peft(folder, facts)
    assert str(folder) in str(error.value)


def test_another_recorded_base_is_a_warning(facts: BaseFacts, folder: Path) -> None:
    edit(folder, base_model_name_or_path="somebody/other-model")
    assert "somebody/other-model" in load_peft(folder, facts).warnings[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_back_to_peft_is_the_same_adapter(base: BaseModel, facts: BaseFacts, tmp_path: Path, variant: str) -> None:
    tiny.save_peft(tmp_path / "a", base, **VARIANTS[variant])
    write_peft(tmp_path / "b", load_peft(tmp_path / "a", facts).adapter)
    first, second = load_file(tmp_path / "a" / PEFT_WEIGHTS), load_file(tmp_path / "b" / PEFT_WEIGHTS)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) and first[k].dtype == second[k].dtype for k in first)
    config = [json.loads((tmp_path / side / PEFT_CONFIG).read_text()) for side in "ab"]
    given = {key: value for key, value in config[0].items() if value is not None}
    assert given == {key: config[1][key] for key in given}


def test_peft_loads_what_we_write(base: BaseModel, facts: BaseFacts, folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = load_peft(folder, facts).adapter
    write_peft(tmp_path / "out", adapter)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base.path), tmp_path / "out")
    for name, pair in adapter.pairs.items():
        delta = model.get_submodule(f"base_model.model.{name}").get_delta_weight("default")
        assert torch.equal(delta, (pair.b @ pair.a) * pair.scaling)


def test_adapter_without_a_recorded_config(facts: BaseFacts, tmp_path: Path) -> None:
    pairs = {
        name: LowRankPair(torch.randn(rank, i), torch.randn(o, rank), scaling)
        for (name, (i, o)), rank, scaling in zip(
            facts.shapes.items(),
            [4, 4, 8, 3, 4, 4, 4] * tiny.LAYERS,
            [2.0, 0.1, 1 / 3, 16 / math.sqrt(3)] * 21,
            strict=True,
        )
    }
    adapter = Adapter("lora", facts.fingerprint, pairs)
    config = peft_config(adapter)
    for name, pair in pairs.items():
        assert rank_and_scaling(config, name) == (pair.rank, pytest.approx(pair.scaling, rel=1e-15))
    write_peft(tmp_path / "a", adapter)
    assert load_peft(tmp_path / "a", facts).adapter.pairs.keys() == pairs.keys()


def test_stock_loaders_refuse_a_prefill_only_adapter(
    base: BaseModel, facts: BaseFacts, folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = load_peft(folder, facts, "lorap").adapter
    write_peft(tmp_path / "out", adapter)
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [PREFILL_CONFIG, PREFILL_WEIGHTS]
    model = AutoModelForCausalLM.from_pretrained(base.path)
    with pytest.raises(ValueError, match=r"Can't find 'adapter_config\.json'"):
        PeftModel.from_pretrained(model, str(tmp_path / "out"))
    # Renamed by hand it is refused as well, for its type.
    (tmp_path / "out" / PREFILL_CONFIG).rename(tmp_path / "out" / PEFT_CONFIG)
    (tmp_path / "out" / PREFILL_WEIGHTS).rename(tmp_path / "out" / PEFT_WEIGHTS)
    with pytest.raises((KeyError, ValueError), match="LORAP"):
        PeftModel.from_pretrained(model, str(tmp_path / "out"))
    with pytest.raises(UserError, match="does not belong"):
        load_peft(tmp_path / "out", facts)


def test_prefill_only_round_trip_keeps_the_method(facts: BaseFacts, folder: Path, tmp_path: Path) -> None:
    adapter = load_peft(folder, facts, "lorap").adapter
    write_peft(tmp_path / "out", adapter)
    back = load_peft(tmp_path / "out", facts).adapter
    assert back.method == "lorap"
    tiny.assert_same(adapter, back)


def test_out_folder_with_other_files_is_left_alone(facts: BaseFacts, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds other files \(such as notes\.txt\)"):
        write_peft(tmp_path / "out", load_peft(folder, facts).adapter)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("method", ["lora", "lorap"])
def test_out_folder_with_another_adapter_is_left_alone(
    facts: BaseFacts, folder: Path, tmp_path: Path, method: str
) -> None:
    out, adapter = tmp_path / "out", load_peft(folder, facts, method).adapter
    write_peft(out, adapter)
    write_peft(out, adapter)  # the same once more loses nothing
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    pairs = {m: LowRankPair(pair.a, pair.b + (m == Q1.removeprefix("base_model.model.")), pair.scaling)
             for m, pair in adapter.pairs.items()}  # fmt: skip
    scaled = {m: LowRankPair(pair.a, pair.b, pair.scaling * 2) for m, pair in adapter.pairs.items()}
    for other in (pairs, scaled):
        with pytest.raises(UserError, match=r"holds another adapter.*choose another --out or delete it"):
            write_peft(out, Adapter(method, adapter.base, other, {}))
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_out_folder_with_a_damaged_adapter_is_left_alone(
    facts: BaseFacts, folder: Path, tmp_path: Path, damage: str
) -> None:
    out, adapter = tmp_path / "out", load_peft(folder, facts).adapter
    write_peft(out, adapter)
    (out / PEFT_WEIGHTS).unlink() if damage == "missing" else (out / PEFT_WEIGHTS).write_bytes(b"half")
    with pytest.raises(UserError, match="holds another adapter"):
        write_peft(out, adapter)
    assert (out / PEFT_CONFIG).is_file()
