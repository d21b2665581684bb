"""PEFT weights in several files: whole or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from preft_cli.adapters.base import BaseFacts
from preft_cli.adapters.layout import PEFT_BIN_INDEX, PEFT_CONFIG, PEFT_INDEX, PEFT_WEIGHTS
from preft_cli.adapters.peft_in import load_peft
from preft_cli.adapters.sources import detect
from preft_cli.errors import UserError
from tests.unit import tiny_llama as tiny
from tests.unit.test_adapters_peft import Touch

FIRST, SECOND = "adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BaseFacts]:
    base = tiny.save_base(tmp_path_factory.mktemp("base"))
    folder = tmp_path_factory.mktemp("peft") / "whole"
    tiny.save_peft(folder, base)
    return folder, BaseFacts.of(base)


@pytest.fixture
def facts(saved: tuple[Path, BaseFacts]) -> BaseFacts:
    return saved[1]


@pytest.fixture
def folder(saved: tuple[Path, BaseFacts], tmp_path: Path) -> Path:
    """The adapter in two shards; each holds whole pairs and half pairs."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    shutil.copy(saved[0] / PEFT_CONFIG, folder)
    shard(load_file(saved[0] / PEFT_WEIGHTS), folder, save_file, (FIRST, SECOND), PEFT_INDEX)
    return folder


def shard(tensors: dict[str, Any], folder: Path, save: Callable[..., None], files: tuple[str, str], index: str) -> None:
    names = sorted(tensors)
    weight_map = {name: files[position % 3 == 0] for position, name in enumerate(names)}
    for file in files:
        save({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit(folder: Path, change: Callable[[dict[str, str]], dict[str, Any]]) -> None:
    index = json.loads((folder / PEFT_INDEX).read_text())
    (folder / PEFT_INDEX).write_text(json.dumps({**index, "weight_map": change(index["weight_map"])}))


def refusal(folder: Path, facts: BaseFacts) -> str:
    with pytest.raises(UserError) as caught:
        load_peft(folder, facts)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_shards_make_the_whole(saved: tuple[Path, BaseFacts], folder: Path) -> None:
    whole, facts = saved
    assert detect(folder) == "peft"
    tiny.assert_same(load_peft(folder, facts).adapter, load_peft(whole, facts).adapter)


def test_shards_of_plain_tensors(saved: tuple[Path, BaseFacts], tmp_path: Path) -> None:
    whole, facts = saved
    shutil.copy(whole / PEFT_CONFIG, tmp_path)
    shard(load_file(whole / PEFT_WEIGHTS), tmp_path, torch.save, ("one.bin", "two.bin"), PEFT_BIN_INDEX)
    assert detect(tmp_path) == "peft"
    tiny.assert_same(load_peft(tmp_path, facts).adapter, load_peft(whole, facts).adapter)
    proof = tmp_path / "executed"
    torch.save({"x": Touch(proof)}, tmp_path / "two.bin")
    assert "nothing in it was executed" in refusal(tmp_path, facts)
    assert not proof.exists()


def test_a_shard_is_missing(folder: Path, facts: BaseFacts) -> None:
    (folder / SECOND).unlink()
    assert f"{SECOND} is missing, and {PEFT_INDEX} names it" in refusal(folder, facts)


def test_a_tensor_is_missing_in_its_shard(folder: Path, facts: BaseFacts) -> None:
    tensors = load_file(folder / FIRST)
    gone = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, folder / FIRST)
    text = refusal(folder, facts)
    assert "lacks 1 of" in text
    assert f"such as {gone}" in text


def test_a_tensor_that_the_index_does_not_name(folder: Path, facts: BaseFacts) -> None:
    extra = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
    save_file({**load_file(folder / FIRST), extra: torch.zeros(4, 16)}, folder / FIRST)
    text = refusal(folder, facts)
    assert "holds 1 tensors that" in text
    assert extra in text


def test_two_indexes_of_one_tensor_do_not_hide_it(folder: Path, facts: BaseFacts) -> None:
    """A tensor that lies in both shards: the index names one of them, so the other holds one too many."""
    twice = {**load_file(folder / FIRST), **load_file(folder / SECOND)}
    save_file(twice, folder / SECOND)
    assert "does not name there" in refusal(folder, facts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a"', "not valid JSON"),
        ("[]", "a JSON list, expected an object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "has no weight_map"),
        ('{"weight_map": {}}', "names no tensors"),
    ],
)
def test_an_index_that_is_none(folder: Path, facts: BaseFacts, text: str, message: str) -> None:
    (folder / PEFT_INDEX).write_text(text)
    assert message in refusal(folder, facts)


@pytest.mark.parametrize("name", ["../other/FIRST", "..", "", "/tmp/x.safetensors", "sub/FIRST", "a\0b"])
def test_a_shard_elsewhere(folder: Path, facts: BaseFacts, name: str, tmp_path: Path) -> None:
    for other in (tmp_path / "other", folder / "sub"):
        other.mkdir()
        shutil.copy(folder / FIRST, other / "FIRST")
    edit(folder, lambda shards: {tensor: name if file == FIRST else file for tensor, file in shards.items()})
    assert "shards lie beside their index" in refusal(folder, facts)


def test_a_shard_that_is_a_link_out(folder: Path, facts: BaseFacts, tmp_path: Path) -> None:
    (folder / FIRST).rename(tmp_path / "outside.safetensors")
    (folder / FIRST).symlink_to(tmp_path / "outside.safetensors")
    assert "is a symbolic link that leaves" in refusal(folder, facts)
    (folder / FIRST).unlink()
    (tmp_path / "outside.safetensors").rename(folder / "inside.safetensors")
    (folder / FIRST).symlink_to("inside.safetensors")
    load_peft(folder, facts)
