"""The trained adapter's folder, and telling kinds of adapters apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_patch.base_model import BaseFingerprint
from preft_cli.adapters.base import BaseFacts
from preft_cli.adapters.folder import load_trained, load_trained_for, save_trained
from preft_cli.adapters.layout import TRAINED_CONFIG, TRAINED_WEIGHTS
from preft_cli.adapters.sources import Rejected, Source, default_name, detect, find
from preft_cli.errors import UserError
from preft_cli.methods.lorap.part import LoraSettings
from tests.unit import tiny_llama as tiny


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> BaseFacts:
    return BaseFacts.of(tiny.save_base(tmp_path_factory.mktemp("base")))


def save(folder: Path, facts: BaseFacts, **changes: Any) -> None:
    save_trained(
        folder,
        changes.pop("adapter", tiny.random_adapter(facts)),
        {"lora": LoraSettings(rank=4, alpha=changes.pop("alpha", 8.0), use_rslora=False, target_modules="all-linear")},
        name=changes.pop("name", "tone"),
    )


def test_round_trip(facts: BaseFacts, tmp_path: Path) -> None:
    save(tmp_path / "adapter", facts)
    back = load_trained(tmp_path / "adapter")
    tiny.assert_same(tiny.random_adapter(facts), back)
    assert (back.method, back.base) == ("lorap", facts.fingerprint)
    assert back.meta["chat_template_digest"] == "abc"
    assert back.meta["base_model"] == facts.name
    assert back.meta["step"] == 3
    assert sorted(f.name for f in (tmp_path / "adapter").iterdir()) == [TRAINED_WEIGHTS, TRAINED_CONFIG]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["adapter"]
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in load_file(
        tmp_path / "adapter" / TRAINED_WEIGHTS
    )


def test_saving_replaces_the_folder(facts: BaseFacts, tmp_path: Path) -> None:
    save(tmp_path / "adapter", facts)
    newer = tiny.random_adapter(facts, seed=9)
    save(tmp_path / "adapter", facts, adapter=newer)
    tiny.assert_same(newer, load_trained(tmp_path / "adapter"))
    assert [f.name for f in tmp_path.iterdir()] == ["adapter"]


def test_failed_save_keeps_the_old_folder(facts: BaseFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "adapter", facts)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("preft_cli.adapters.folder.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "adapter", facts, adapter=tiny.random_adapter(facts, seed=9))
    monkeypatch.undo()
    tiny.assert_same(tiny.random_adapter(facts), load_trained(tmp_path / "adapter"))
    assert [f.name for f in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 4.0}, "scaling 2.0, but the adapter's settings give 4 and 1.0"),
        ({"name": "a b"}, "'a b' is not allowed"),
    ],
)
def test_saving_nonsense_is_refused(facts: BaseFacts, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        save(tmp_path / "adapter", facts, **changes)
    assert list(tmp_path.iterdir()) == []


def test_exchanged_tensors_are_noticed(facts: BaseFacts, tmp_path: Path) -> None:
    save(tmp_path / "a", facts)
    save(tmp_path / "b", facts, adapter=tiny.random_adapter(facts, seed=9))
    (tmp_path / "b" / TRAINED_WEIGHTS).replace(tmp_path / "a" / TRAINED_WEIGHTS)
    with pytest.raises(UserError, match="damaged or exchanged"):
        load_trained(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"preft_config\.json is missing"),
        ("{", "not valid JSON"),
        ('{"schema_version": 3}', "written by a newer preft: version 3, this one reads 2"),
        ('{"schema_version": 1}', "name: Field required"),
    ],
)
def test_damaged_config(facts: BaseFacts, tmp_path: Path, content: str | None, message: str) -> None:
    save(tmp_path / "a", facts)
    path = tmp_path / "a" / TRAINED_CONFIG
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_trained(tmp_path / "a")


def test_missing_weights(facts: BaseFacts, tmp_path: Path) -> None:
    save(tmp_path / "a", facts)
    (tmp_path / "a" / TRAINED_WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"preft_adapter\.safetensors is missing"):
        load_trained(tmp_path / "a")


def test_trained_on_other_weights(facts: BaseFacts, tmp_path: Path) -> None:
    save(tmp_path / "a", facts)
    fingerprint = BaseFingerprint.from_dict({**facts.fingerprint.to_dict(), "weights": "other"})
    with pytest.raises(UserError, match=r"another base model .*weights differ"):
        load_trained_for(tmp_path / "a", facts._replace(fingerprint=fingerprint))


def test_stock_loaders_do_not_see_it(facts: BaseFacts, tmp_path: Path) -> None:
    from peft import PeftModel

    save(tmp_path / "a", facts)
    with pytest.raises(ValueError, match=r"Can't find 'adapter_config\.json'"):
        PeftModel.from_pretrained(tiny.llama(num_hidden_layers=1), str(tmp_path / "a"))


def test_detect(facts: BaseFacts, tmp_path: Path) -> None:
    save(tmp_path / "runs" / "tone" / "adapter", facts)
    (tmp_path / "x.preft").touch()
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").touch()
    assert detect(tmp_path / "runs" / "tone" / "adapter") == "trained"
    assert detect(tmp_path / "x.preft") == "store-file"
    assert detect(tmp_path / "peft") == "peft"
    assert detect(tmp_path / "runs") == "folder"
    # A training run's folder, and a folder of runs, lead to the adapters in them, under the names they were given.
    expected = Source(tmp_path / "runs" / "tone" / "adapter", "trained")
    assert list(find(tmp_path / "runs" / "tone")) == [expected]
    assert list(find(tmp_path / "runs")) == [expected]
    assert default_name(expected) == "tone"


def test_detect_says_what_it_expected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path / "notes.txt", tmp_path / "none"):
        with pytest.raises(UserError, match=r"expected a trained adapter \(preft_config\.json\), a PEFT LoRA"):
            detect(path)


@pytest.mark.parametrize("file", ["config.json", "intkey_layer.3.comp.block_output.bin"])
def test_pyreft_is_recognised(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text(json.dumps({"intervention_types": [], "representations": []}))
    assert detect(tmp_path) == "pyreft"
    with pytest.raises(UserError, match=f"did you mean its folder {tmp_path}|is not an adapter"):
        detect(tmp_path / file)


def test_links_out_of_the_folder_are_refused(facts: BaseFacts, tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "served"
    save(outside / "a", facts)
    save(inside / "good", facts)
    (inside / "linked").symlink_to(outside / "a")
    (inside / "partly").mkdir()
    (inside / "partly" / TRAINED_CONFIG).symlink_to(outside / "a" / TRAINED_CONFIG)
    (inside / "run").mkdir()
    (inside / "run" / "adapter").symlink_to(outside / "a")
    found = {entry.path.name: entry for entry in find(inside)}
    assert isinstance(found["good"], Source)
    for name in ("linked", "partly", "run"):
        assert isinstance(found[name], Rejected), name
        assert "symbolic link that leaves" in found[name].reason


def test_nan_is_refused(facts: BaseFacts, tmp_path: Path) -> None:
    save(tmp_path / "a", facts)
    tensors = load_file(tmp_path / "a" / TRAINED_WEIGHTS)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, tmp_path / "a" / TRAINED_WEIGHTS)
    with pytest.raises(UserError, match="NaN or infinite"):
        load_trained(tmp_path / "a")
