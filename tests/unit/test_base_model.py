"""Fingerprints tell base models apart, and never more than that."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_patch.base_model import BaseFingerprint, weights_digest
from engine_patch.errors import PreftError
from tests.unit import tiny_llama as tiny

CONFIG = {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "vocab_size": 100}


def test_mismatch_names_the_field_and_both_values() -> None:
    adapter = BaseFingerprint.from_hf_config(CONFIG)
    served = BaseFingerprint.from_hf_config({**CONFIG, "hidden_size": 896})
    assert adapter.mismatch(served) == "hidden_size is 576 in the adapter and 896 in the base model"
    assert adapter.mismatch(adapter) is None


def test_unknown_is_not_compared() -> None:
    known = BaseFingerprint.from_hf_config(CONFIG, weights="aa")
    assert known.mismatch(BaseFingerprint(model_type="llama")) is None
    assert BaseFingerprint().mismatch(known) is None


def test_other_weights_of_the_same_shape_are_a_mismatch() -> None:
    text = BaseFingerprint.from_hf_config(CONFIG, "aa").mismatch(BaseFingerprint.from_hf_config(CONFIG, "bb"))
    assert text is not None
    assert "aa" in text
    assert "bb" in text


def test_config_object_and_dict_agree() -> None:
    config = tiny.llama(num_hidden_layers=1).config
    assert BaseFingerprint.from_hf_config(config) == BaseFingerprint.from_hf_config(config.to_dict())
    assert BaseFingerprint.from_hf_config(config).num_key_value_heads == 1


def test_missing_kv_heads_mean_as_many_as_heads() -> None:
    assert BaseFingerprint.from_hf_config(CONFIG).num_key_value_heads == 9


def test_text_part_of_a_multimodal_config() -> None:
    assert BaseFingerprint.from_hf_config({"model_type": "vl", "text_config": CONFIG}).hidden_size == 576


def test_dict_round_trip_ignores_foreign_keys() -> None:
    fingerprint = BaseFingerprint.from_hf_config(CONFIG, weights="aa")
    assert BaseFingerprint.from_dict({**fingerprint.to_dict(), "later": 1}) == fingerprint


def test_weights_digest_sees_values_and_not_metadata(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    tensors = {"w": torch.arange(100_000, dtype=torch.float32)}
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, tmp_path / "b" / "model.safetensors", metadata={"format": "pt", "by": "somebody else"})
    save_file({"w": tensors["w"] + 1}, tmp_path / "c" / "model.safetensors")
    first = weights_digest(tmp_path / "a")
    assert first is not None
    assert first == weights_digest(tmp_path / "b")
    assert first != weights_digest(tmp_path / "c")
    assert torch.equal(load_file(tmp_path / "a" / "model.safetensors")["w"], tensors["w"])


def test_weights_digest_without_weights(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"1234", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 4) + b"[1]x"])
def test_weights_digest_of_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(PreftError, match=r"model\.safetensors is not a safetensors file"):
        weights_digest(tmp_path)


def test_header_of_random_base_has_json_form() -> None:
    assert json.loads(json.dumps(BaseFingerprint().to_dict()))["weights"] is None
