"""The type of the stored weights: where it comes from, and that a cast is the only thing that changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_patch.store import read_adapter
from preft_cli.adapters.base import BaseFacts
from preft_cli.adapters.layout import PEFT_WEIGHTS
from preft_cli.adapters.peft_in import load_peft
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.dtype import served_dtype
from preft_cli.convert.run import convert, plan_convert
from preft_cli.models import BaseModel
from preft_cli.models.peek import peek_config
from tests.unit import tiny_llama as tiny


@pytest.mark.parametrize(
    ("sections", "base", "expected"),
    [
        ({"convert": {"dtype": "float16"}, "serve": {"dtype": "bfloat16"}}, {"dtype": "float32"}, "float16"),
        ({"convert": {"dtype": "float32"}}, {"dtype": "bfloat16"}, "float32"),
        ({"serve": {"dtype": "float32"}}, {"dtype": "bfloat16"}, "float32"),
        ({}, {"dtype": "bfloat16"}, "bfloat16"),
        ({}, {"torch_dtype": "float16"}, "float16"),
        ({}, {"torch_dtype": "torch.float16"}, "float16"),
        ({}, {"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({}, {"dtype": "float32"}, None),
        ({}, {"dtype": "float64"}, None),
        ({}, {"dtype": 3}, None),
        ({}, {}, None),
        ({}, None, None),
    ],
)
def test_where_the_type_comes_from(sections: dict[str, Any], base: dict[str, Any] | None, expected: str | None) -> None:
    assert served_dtype(PreftConfig.model_validate(sections), base) == expected


def test_the_base_models_config_is_looked_at_without_fetching_it(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "config.json").write_text('{"dtype": "float16"}')
    assert peek_config("local", tmp_path) == {"dtype": "float16"}
    (tmp_path / "local" / "config.json").write_text('{"dtype": "flo')
    assert peek_config("local", tmp_path) is None
    assert peek_config("nobody/has-this-one", tmp_path) is None
    assert peek_config("smollm2-135m", tmp_path) == {"dtype": "bfloat16"}
    shape = peek_config("random:llama-3.1-8b", tmp_path)
    assert shape is not None
    assert shape["dtype"] == "bfloat16"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return tiny.save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def peft(base: BaseModel, tmp_path: Path) -> Path:
    tiny.save_peft(tmp_path / "tone", base)
    return tmp_path / "tone"


def config(base: BaseModel, dtype: str) -> PreftConfig:
    return PreftConfig.model_validate({"model": {"base": base.name}, "convert": {"dtype": dtype}})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cast_once_scaling_untouched(base: BaseModel, peft: Path, tmp_path: Path, dtype: str) -> None:
    settings = config(base, dtype)
    assert plan_convert([peft], settings, tmp_path).items[0].dtype == dtype
    (item,) = convert([peft], settings, tmp_path).converted
    stored, source = read_adapter(Path(item.path)), load_peft(peft, BaseFacts.of(base)).adapter
    assert (item.dtype, item.notes) == (dtype, [])
    kind = getattr(torch, dtype)
    for name, pair in source.pairs.items():
        assert torch.equal(stored.pairs[name].a, pair.a.to(kind))
        assert torch.equal(stored.pairs[name].b, pair.b.to(kind))
        assert stored.pairs[name].scaling == pair.scaling
    assert convert([peft], settings, tmp_path, check=True).failed == [], "compared in the file's type"
    out = convert([Path(item.path)], config(base, "float32"), tmp_path, to="peft", out=tmp_path / "out")
    assert out.converted[0].dtype == dtype, "the way back casts nothing"
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / PEFT_WEIGHTS).values()} == {kind}


def test_check_still_tells_other_weights_after_a_cast(base: BaseModel, peft: Path, tmp_path: Path) -> None:
    convert([peft], config(base, "bfloat16"), tmp_path)
    tiny.save_peft(peft, base, seed=7)
    assert "holds other weights" in convert([peft], config(base, "auto"), tmp_path, check=True).failed[0].reason


def test_a_value_too_large_for_float16(base: BaseModel, peft: Path, tmp_path: Path) -> None:
    tensors = load_file(peft / PEFT_WEIGHTS)
    name = "base_model.model.model.layers.3.mlp.down_proj.lora_B.weight"
    tensors[name][2, 1] = -70000.0
    save_file(tensors, peft / PEFT_WEIGHTS)
    result = convert([peft], config(base, "float16"), tmp_path)
    assert result.converted == []
    assert "lora_B of model.layers.3.mlp.down_proj does not fit float16" in result.failed[0].reason
    assert "7e+04" in result.failed[0].reason
    assert not list((tmp_path / "store").glob("*"))
    assert convert([peft], config(base, "bfloat16"), tmp_path).failed == []


def test_another_type_is_another_file(base: BaseModel, peft: Path, tmp_path: Path) -> None:
    first = convert([peft], config(base, "bfloat16"), tmp_path).converted[0]
    second = convert([peft], config(base, "float32"), tmp_path).converted[0]
    assert (second.status, second.replaced) == ("converted", first.digest)


def test_the_plan_of_a_model_that_is_not_here_needs_no_extras(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
sys.modules["huggingface_hub"] = None
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.run import plan_convert
config = PreftConfig.model_validate({{"model": {{"base": "nobody/has-this-one"}}}})
assert plan_convert([], config, Path({str(tmp_path)!r})).dtype is None
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
