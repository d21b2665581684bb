"""Folders of trained adapters with DiReFT interventions: written, read, and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_patch.adapter import Adapter
from engine_patch.residual import unknown
from preft_cli.adapters.base import BaseFacts
from preft_cli.adapters.folder import load_trained, load_trained_for, save_trained
from preft_cli.adapters.layout import TRAINED_CONFIG, TRAINED_WEIGHTS
from preft_cli.adapters.peft_out import write_peft
from preft_cli.adapters.trained_config import read_trained_config
from preft_cli.config.schema import AdapterConfig
from preft_cli.errors import UserError
from preft_cli.methods import PARTS, parts_of
from preft_cli.models.modules import Modules
from tests.reference import random_adapter
from tests.unit import tiny_llama as tiny

W1, W2, B = (f"model.layers.3.residual.{part}" for part in ("w1", "w2", "b"))


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> BaseFacts:
    return BaseFacts.of(tiny.save_base(tmp_path_factory.mktemp("base")))


def made(facts: BaseFacts, method: str = "direftp", rank: int = 4) -> Adapter:
    modules = Modules(facts.shapes, facts.streams)
    return random_adapter(modules, facts.fingerprint, seed=0, rank=rank, method=method)


def save(folder: Path, facts: BaseFacts, method: str = "direftp", rank: int = 4) -> Adapter:
    config = AdapterConfig(method=method, rank=rank, alpha=2 * rank)
    settings = {p.name: p.settings(config, p.targets(config, facts)) for p in parts_of(method)}
    adapter = made(facts, method, rank)
    save_trained(folder, adapter, settings, name="tone")
    return adapter


@pytest.mark.parametrize("method", ["direftp", "direft", "lorap+direftp", "lora+direft"])
def test_round_trip(facts: BaseFacts, tmp_path: Path, method: str) -> None:
    adapter = save(tmp_path / "a", facts, method)
    for back in (load_trained(tmp_path / "a"), load_trained_for(tmp_path / "a", facts).adapter):
        tiny.assert_same(adapter, back)
        for name in facts.streams:
            assert torch.equal(adapter.pairs[name].tensors["bias"], back.pairs[name].tensors["bias"])
        assert (back.method, back.digest()) == (method, adapter.digest())
        assert ("peft" in back.meta) == ("lora" in method)
    recorded = json.loads((tmp_path / "a" / TRAINED_CONFIG).read_text())
    assert recorded["schema_version"] == 2
    assert recorded["parts"]["direft"] == {"rank": 4, "layers": list(range(tiny.LAYERS)), "orthogonal": False}
    assert ("lora" in recorded["parts"]) == ("lora" in method)
    tensors = load_file(tmp_path / "a" / TRAINED_WEIGHTS)
    pair = adapter.pairs["model.layers.3.residual"]
    assert torch.equal(tensors[W1], pair.a)
    assert torch.equal(tensors[W2], pair.b.T)
    assert torch.equal(tensors[B], pair.tensors["bias"])


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(folder / TRAINED_WEIGHTS)
    change(tensors)
    save_file(tensors, folder / TRAINED_WEIGHTS)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / TRAINED_CONFIG).read_text())
    change(config)
    (folder / TRAINED_CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(W2), r"tensor model\.layers\.3\.residual\.w2 is missing"),
        (lambda t: t.pop(B), r"tensor model\.layers\.3\.residual\.b is missing"),
        (lambda t: t.update({W2: t[W2][:3].contiguous()}), r"w2 of shape \[3, 16\].*config says rank 4"),
        (lambda t: t.update({B: t[B][:2].contiguous()}), r"b of shape \[2\]"),
        (lambda t: t.update({W1: t[W1].T.contiguous()}), r"w1 of shape \[16, 4\]"),
        (lambda t: t[B].fill_(torch.inf), "NaN or infinite"),
        (lambda t: t.update({"model.layers.3.residual.w3": t[W1].clone()}), "unknown tensor .*residual.w3"),
        (lambda t: t.update({"model.norm.weight": t[W1].clone()}), "unknown tensor model.norm.weight"),
        (
            lambda t: t.update({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": t[W1].clone()}),
            "lora_A.weight is of LoRA, which a direftp adapter has not",
        ),
        (lambda t: t.clear(), "holds no tensors of DiReFT"),
        (lambda t: t[W1].add_(1e-3), "damaged or exchanged"),
        (lambda t: [t.pop(name) for name in (W1, W2, B)], "damaged or exchanged"),
    ],
)
def test_damaged_tensors(
    facts: BaseFacts, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    save(tmp_path / "a", facts)
    edit_tensors(tmp_path / "a", change)
    with pytest.raises(UserError, match=message):
        load_trained(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 5}, "config says rank 5"),
        ({"rank": 0}, r"parts: direft\.rank: Input should be greater than 0"),
        ({"layers": []}, r"parts: direft\.layers: List should have at least 1 item"),
        ({"layers": [*range(12), 40]}, r"names layer 40 and .* has 12 layers \(0 to 11\)"),
        ({"layers": [3]}, r"holds interventions of 11 layers that its config does not name, such as model\.layers\.0"),
        ({"alpha": 3}, r"direft\.alpha: Extra inputs are not permitted"),
    ],
)
def test_settings_that_are_not_the_tensors(
    facts: BaseFacts, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    save(tmp_path / "a", facts)
    edit_config(tmp_path / "a", lambda config: config["parts"]["direft"].update(change))
    with pytest.raises(UserError, match=message):
        load_trained_for(tmp_path / "a", facts)


def test_parts_are_those_of_the_method(facts: BaseFacts, tmp_path: Path) -> None:
    save(tmp_path / "a", facts, "lorap+direftp")
    edit_config(tmp_path / "a", lambda config: config["parts"].pop("lora"))
    with pytest.raises(UserError, match=r"a lorap\+direftp adapter has the parts direft and lora, this one has direft"):
        load_trained(tmp_path / "a")


def test_another_base_model(facts: BaseFacts, tmp_path: Path) -> None:
    adapter = save(tmp_path / "a", facts)
    shapes, streams = ({n: s for n, s in m.items() if ".1" not in n} for m in (facts.shapes, facts.streams))
    with pytest.raises(UserError, match=r"another base model: it adapts layer 11 and short has 9 layers"):
        load_trained_for(tmp_path / "a", facts._replace(shapes=shapes, streams=streams, name="short"))
    wide = facts._replace(streams=dict.fromkeys(adapter.pairs, (32, 32)))
    with pytest.raises(UserError, match=r"residual has 16 inputs and 16 outputs in the adapter, 32 and 32"):
        load_trained_for(tmp_path / "a", wide)


def test_missing_layers(facts: BaseFacts, tmp_path: Path) -> None:
    config = AdapterConfig(method="direftp", rank=4, layers=[1, 3])
    settings = PARTS["direft"].settings(config, ["model.layers.1.residual", "model.layers.3.residual"])
    whole = made(facts)
    one = Adapter("direftp", facts.fingerprint, {"model.layers.3.residual": whole.pairs["model.layers.3.residual"]})
    save_trained(tmp_path / "a", one, {"direft": settings}, name="tone")
    with pytest.raises(UserError, match=r"of 1 of 2 layers are missing, such as model\.layers\.1\.residual"):
        load_trained_for(tmp_path / "a", facts)


def test_a_base_model_whose_streams_are_not_known(facts: BaseFacts, tmp_path: Path) -> None:
    save(tmp_path / "a", facts)
    with pytest.raises(UserError, match="DiReFT acts on the residual stream") as caught:
        load_trained_for(tmp_path / "a", facts._replace(streams={}))
    assert unknown("llama") in str(caught.value)
    with pytest.raises(UserError, match="exactly one list named `layers`"):
        load_trained_for(tmp_path / "a", facts._replace(streams={}, declared=True))


def test_files_of_version_1_are_read(facts: BaseFacts, tmp_path: Path) -> None:
    save(tmp_path / "a", facts, "lorap")

    def older(config: dict[str, Any]) -> None:
        config.update(config.pop("parts")["lora"], schema_version=1)

    edit_config(tmp_path / "a", older)
    adapter = load_trained_for(tmp_path / "a", facts).adapter
    tiny.assert_same(adapter, made(facts, "lorap"))
    assert adapter.meta["peft"]["lora_alpha"] == 8
    assert read_trained_config(tmp_path / "a").parts["lora"].scaling == 2.0
    edit_config(tmp_path / "a", lambda config: config.pop("alpha"))
    with pytest.raises(UserError, match=r"parts: lora\.alpha: Field required"):
        load_trained(tmp_path / "a")


@pytest.mark.parametrize("method", ["direftp", "lora+direft"])
def test_peft_has_no_form_for_it(facts: BaseFacts, tmp_path: Path, method: str) -> None:
    with pytest.raises(UserError, match="PEFT has no form for DiReFT"):
        write_peft(tmp_path / "peft", made(facts, method))
    assert not (tmp_path / "peft").exists()


def test_layers(facts: BaseFacts) -> None:
    def targets(**settings: Any) -> list[str]:
        return PARTS["direft"].targets(AdapterConfig(method="direftp", **settings), facts)

    assert targets() == list(facts.streams)
    assert targets(layers=[10, 2, 2]) == ["model.layers.2.residual", "model.layers.10.residual"]
    with pytest.raises(UserError, match=r"has no layer 12, 13; it has 12 decoder layers, 0 to 11") as caught:
        targets(layers=[13, 0, 12])
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match=r"17 rows of .* width 16 cannot be orthogonal") as caught:
        targets(orthogonal=True, direft_rank=17)
    assert caught.value.exit_code == 2
    assert PARTS["direft"].settings(AdapterConfig(method="direftp", direft_rank=2), targets(layers=[7, 5])) == (
        PARTS["direft"].settings_type.model_validate({"rank": 2, "layers": [5, 7], "orthogonal": False})
    )


def test_plans_read_configs_without_torch() -> None:
    code = "import sys, preft_cli.adapters.trained_config; sys.exit(bool({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
