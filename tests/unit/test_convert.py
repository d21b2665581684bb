"""`preft convert` and the server's collection of adapters: the good ones arrive, each bad one has its reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine_patch.store import read_adapter, read_header, write_adapter
from preft_cli.adapters.base import BaseFacts
from preft_cli.adapters.folder import load_trained, save_trained
from preft_cli.adapters.layout import PEFT_CONFIG, PEFT_WEIGHTS, PREFILL_CONFIG, PREFILL_WEIGHTS
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.collect import collect, prune
from preft_cli.convert.results import ConvertResult
from preft_cli.convert.run import convert, plan_convert
from preft_cli.errors import UserError
from preft_cli.methods.lorap.part import LoraSettings
from preft_cli.models import BaseModel
from tests.unit import tiny_llama as tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return tiny.save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def facts(base: BaseModel) -> BaseFacts:
    return BaseFacts.of(base)


@pytest.fixture(scope="module")
def peft(base: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft") / "pirate"
    tiny.save_peft(folder, base)
    return folder


@pytest.fixture
def config(base: BaseModel) -> PreftConfig:
    return PreftConfig.model_validate({"model": {"base": base.name}, "adapter": {"name": "tone"}})


def train(folder: Path, facts: BaseFacts, name: str = "tone", **adapter: Any) -> Path:
    save_trained(
        folder,
        tiny.random_adapter(facts, **adapter),
        {"lora": LoraSettings(rank=4, alpha=8.0, use_rslora=False, target_modules="all-linear")},
        name=name,
    )
    return folder


def reasons(result: ConvertResult) -> dict[str, str]:
    return {Path(item.source).name: item.reason for item in result.failed}


def test_default_source_is_the_trained_adapter(config: PreftConfig, facts: BaseFacts, tmp_path: Path) -> None:
    train(tmp_path / "runs" / "tone" / "adapter", facts)
    result = convert([], config, tmp_path)
    (item,) = result.converted
    assert (item.name, item.method, item.rank, result.failed) == ("tone", "lorap", 4, [])
    path = tmp_path / "store" / "tone.preft"
    assert item.path == str(path)
    assert item.bytes == path.stat().st_size
    adapter = read_adapter(path)
    tiny.assert_same(adapter, tiny.random_adapter(facts))
    assert adapter.digest() == item.digest
    assert adapter.meta["chat_template_digest"] == "abc"
    assert ConvertResult.model_validate_json(result.model_dump_json()) == result


def test_not_trained_yet(config: PreftConfig, tmp_path: Path) -> None:
    result = convert([], config, tmp_path)
    assert result.converted == []
    assert "does not exist" in result.failed[0].reason
    assert "run preft train first" in result.failed[0].reason


def test_peft_becomes_lora_and_lorap_only_when_asked(
    config: PreftConfig, peft: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (item,) = convert([peft], config, tmp_path).converted
    assert (item.name, item.method) == ("pirate", "lora")
    assert "changes what" not in capfd.readouterr().err
    (item,) = convert([peft], config, tmp_path, method="lorap", name="short").converted
    assert (item.name, item.method) == ("short", "lorap")
    assert "changes what this adapter computes" in capfd.readouterr().err
    stored = [read_header(tmp_path / "store" / f"{name}.preft") for name in ("pirate", "short")]
    assert [header.method for header in stored] == ["lora", "lorap"]
    assert stored[0].digest != stored[1].digest


def test_there_and_back_to_peft(config: PreftConfig, peft: Path, tmp_path: Path) -> None:
    convert([peft], config, tmp_path)
    result = convert([tmp_path / "store" / "pirate.preft"], config, tmp_path, to="peft", out=tmp_path / "out")
    assert result.failed == []
    before, after = load_file(peft / PEFT_WEIGHTS), load_file(tmp_path / "out" / PEFT_WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    configs = [json.loads((folder / PEFT_CONFIG).read_text()) for folder in (peft, tmp_path / "out")]
    for key in ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern"):
        assert configs[0][key] == configs[1][key], key


def test_prefill_only_to_peft_keeps_away_from_stock_loaders(
    config: PreftConfig, facts: BaseFacts, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a", facts)
    convert([tmp_path / "a"], config, tmp_path)
    out = tmp_path / "out"
    assert convert([], config, tmp_path, to="peft", out=out).failed == []
    assert sorted(f.name for f in out.iterdir()) == [PREFILL_CONFIG, PREFILL_WEIGHTS]
    assert "stock loaders would apply it to all tokens" in capfd.readouterr().err
    assert convert([], config, tmp_path, to="peft", out=out, method="lora").failed == []
    assert sorted(f.name for f in out.iterdir()) == [PEFT_CONFIG, PEFT_WEIGHTS]
    assert "changes what this adapter computes" in capfd.readouterr().err
    trained = load_trained(tmp_path / "a")
    back = load_file(out / PEFT_WEIGHTS)
    for module, pair in trained.pairs.items():
        assert torch.equal(back[f"base_model.model.{module}.lora_A.weight"], pair.a)
        assert torch.equal(back[f"base_model.model.{module}.lora_B.weight"], pair.b)


def test_to_peft_never_replaces_another_adapter(
    config: PreftConfig, facts: BaseFacts, peft: Path, tmp_path: Path
) -> None:
    good = tmp_path / "good"
    good.mkdir()
    for name in (PEFT_CONFIG, PEFT_WEIGHTS):
        shutil.copy(peft / name, good)
    before = (good / PEFT_WEIGHTS).read_bytes()
    train(tmp_path / "a", facts)
    convert([tmp_path / "a"], config, tmp_path)
    result = convert([], config, tmp_path, to="peft", out=good)
    assert result.converted == []
    assert "choose another --out or delete it" in result.failed[0].reason
    assert (good / PEFT_WEIGHTS).read_bytes() == before
    assert convert([peft], config, tmp_path, to="peft", out=good).failed == [], "the same adapter loses nothing"


def test_one_bad_adapter_does_not_stop_the_others(
    config: PreftConfig, facts: BaseFacts, peft: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "many"
    make_mixture(folder, facts, peft)
    result = convert([folder], config, tmp_path)
    assert sorted(item.name for item in result.converted) == ["good", "lora"]
    assert sorted(reasons(result)) == ["bad name", "empty", "no-config", "no-weights", "truncated", "twin", "used"]
    assert not list((tmp_path / "store").glob("*truncated*"))


def make_mixture(folder: Path, facts: BaseFacts, peft: Path) -> None:
    """Two good adapters and every kind of bad one."""
    train(folder / "good", facts, "good")
    shutil.copytree(peft, folder / "lora")
    for name in ("no-config", "no-weights", "truncated", "bad name"):
        shutil.copytree(peft, folder / name)
    (folder / "no-config" / PEFT_CONFIG).unlink()
    (folder / "no-weights" / PEFT_WEIGHTS).unlink()
    (folder / "truncated" / PEFT_CONFIG).write_text('{"peft_type": "LO')
    (folder / "empty").mkdir()
    (folder / "stray.txt").write_text("hello")
    (folder / ".hidden").mkdir()
    train(folder / "twin", facts, "twin")
    train(folder / "used", facts, "used")
    (folder / "used" / "preft_adapter.safetensors").write_bytes(b"")
    (folder / "twin" / "preft_adapter.safetensors").unlink()


def test_replacing_another_adapter_says_so(
    config: PreftConfig, facts: BaseFacts, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a", facts)
    first = convert([tmp_path / "a"], config, tmp_path).converted[0]
    again = convert([tmp_path / "a"], config, tmp_path).converted[0]
    assert again.replaced is None
    train(tmp_path / "a", facts, seed=5)
    second = convert([tmp_path / "a"], config, tmp_path).converted[0]
    assert second.replaced == first.digest != second.digest
    assert "replaced" in capfd.readouterr().err
    assert read_header(tmp_path / "store" / "tone.preft").digest == second.digest
    (tmp_path / "store" / "tone.preft").write_bytes(b"broken")
    assert convert([tmp_path / "a"], config, tmp_path).converted[0].replaced == "damaged"


def test_names(config: PreftConfig, facts: BaseFacts, peft: Path, tmp_path: Path) -> None:
    train(tmp_path / "a", facts)
    result = convert([tmp_path / "a", train(tmp_path / "b", facts)], config, tmp_path)
    assert len(result.converted) == 1
    text = reasons(result)["b"]
    assert str(tmp_path / "a") in text
    assert str(tmp_path / "b") in text
    assert "both called 'tone'" in text
    for name in ("a/b", "..", "a b", "tön", "a:b"):
        assert "is not allowed" in convert([peft], config, tmp_path, name=name).failed[0].reason
    with pytest.raises(UserError, match="--name names one adapter, and 2 were found") as error:
        convert([tmp_path / "a", peft], config, tmp_path, name="x")
    assert error.value.exit_code == 2


def test_base_models_own_name(facts: BaseFacts, peft: Path, tmp_path: Path) -> None:
    config = PreftConfig.model_validate({"model": {"base": "smollm2-135m"}})
    (failed,) = plan_convert([peft], config, tmp_path, name="smollm2-135m").failed
    assert "base model's own name" in failed.reason


def test_another_base_model(facts: BaseFacts, tmp_path: Path) -> None:
    train(tmp_path / "a", facts)
    other = tiny.save_base(tmp_path / "other", vocab_size=128)
    config = PreftConfig.model_validate({"model": {"base": other.name}})
    assert "vocab_size is 64 in the adapter and 128" in convert([tmp_path / "a"], config, tmp_path).failed[0].reason


def test_check(config: PreftConfig, facts: BaseFacts, tmp_path: Path) -> None:
    train(tmp_path / "a", facts)
    convert([tmp_path / "a"], config, tmp_path)
    store = tmp_path / "store"
    good = (store / "tone.preft").read_bytes()
    (store / "damaged.preft").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    (store / "half.preft").write_bytes(good[: len(good) // 2])
    (store / "bad name.preft").write_bytes(good)
    result = convert([], config, tmp_path, check=True)
    assert [item.name for item in result.converted] == ["tone"]
    assert result.action == "check"
    assert {name: text.partition(":")[0] != "" for name, text in reasons(result).items()}.keys() == {
        "damaged.preft",
        "half.preft",
        "bad name.preft",
    }
    assert "is damaged: its content has the digest" in reasons(result)["damaged.preft"]
    assert "truncated or half-written" in reasons(result)["half.preft"]
    assert (store / "tone.preft").read_bytes() == good


def test_check_against_the_source(config: PreftConfig, facts: BaseFacts, tmp_path: Path) -> None:
    train(tmp_path / "a", facts)
    assert "convert" in convert([tmp_path / "a"], config, tmp_path, check=True).failed[0].reason
    convert([tmp_path / "a"], config, tmp_path)
    assert convert([tmp_path / "a"], config, tmp_path, check=True).failed == []
    train(tmp_path / "a", facts, seed=7)
    assert "holds other weights" in convert([tmp_path / "a"], config, tmp_path, check=True).failed[0].reason


@pytest.mark.parametrize(
    "options", [{"to": "peft"}, {"check": True, "to": "peft", "out": Path("x")}, {"check": True, "method": "lora"}]
)
def test_options_that_contradict(config: PreftConfig, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        convert([], config, tmp_path, **options)
    assert error.value.exit_code == 2


def test_full_disk(config: PreftConfig, facts: BaseFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "a", facts)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine_patch.store.atomic.os.fsync", full)
    result = convert([tmp_path / "a"], config, tmp_path)
    assert "No space left on device" in result.failed[0].reason
    assert list((tmp_path / "store").iterdir()) == []


def test_plan_needs_the_core_install_only(facts: BaseFacts, tmp_path: Path) -> None:
    train(tmp_path / "runs" / "tone" / "adapter", facts)
    code = f"""
import sys
from pathlib import Path
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.run import plan_convert
config = PreftConfig.model_validate({{"adapter": {{"name": "tone"}}}})
plan = plan_convert([], config, Path({str(tmp_path)!r}))
assert [item.name for item in plan.items] == ["tone"], plan
assert not {{"torch", "numpy", "safetensors", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_plan_decides_without_writing(config: PreftConfig, facts: BaseFacts, peft: Path, tmp_path: Path) -> None:
    make_mixture(tmp_path / "many", facts, peft)
    plan = plan_convert([tmp_path / "many"], config, tmp_path)
    assert {item.name: item.method for item in plan.items if item.name in ("good", "lora")} == {
        "good": None,
        "lora": "lora",
    }
    assert {Path(item.source).name for item in plan.failed} == {"bad name", "empty"}
    assert [Path(note.split(" is no adapter")[0]).name for note in plan.notes] == ["stray.txt"]
    assert not (tmp_path / "store").exists()
    several = plan_convert([tmp_path / "many"], config, tmp_path, to="peft", out=tmp_path / "out")
    assert str(tmp_path / "out" / "good") in {item.path for item in several.items}


def test_collect_serves_the_good_and_lists_each_other(
    base: BaseModel, facts: BaseFacts, peft: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "served"
    make_mixture(folder, facts, peft)
    write_adapter(folder / "paged.preft", tiny.random_adapter(facts, rank=12))
    write_adapter(folder / "half.preft", tiny.random_adapter(facts))
    (folder / "half.preft").write_bytes((folder / "half.preft").read_bytes()[:5000])
    collected = collect(folder, base, tmp_path / "cache")
    assert sorted(collected.adapters) == ["good", "lora", "paged"]
    assert {name: header.method for name, header in collected.headers.items()} == {
        "good": "lorap",
        "lora": "lora",
        "paged": "lorap",
    }
    assert collected.adapters["paged"] == folder / "paged.preft"
    found = {path.name: reason for path, reason in collected.rejected}
    expected = ["bad name", "empty", "half.preft", "no-config", "no-weights", "stray.txt", "truncated", "twin", "used"]
    assert sorted(found) == expected
    assert "not valid JSON" in found["truncated"]
    assert "is empty" in found["empty"]
    assert "adapter_config.json is missing" in found["no-config"]
    assert "adapter_model.safetensors is missing" in found["no-weights"]
    assert "is not an adapter" in found["stray.txt"]


def test_collect_converts_once_and_again_after_a_change(
    base: BaseModel, facts: BaseFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "served" / "a", facts)
    first = collect(tmp_path / "served", base, tmp_path / "cache").adapters["tone"]
    tiny.assert_same(read_adapter(first), tiny.random_adapter(facts))
    written = first.stat().st_mtime_ns
    second = collect(tmp_path / "served", base, tmp_path / "cache").adapters["tone"]
    assert (second, second.stat().st_mtime_ns) == (first, written)
    train(tmp_path / "served" / "a", facts, seed=5)
    third = collect(tmp_path / "served", base, tmp_path / "cache").adapters["tone"]
    tiny.assert_same(read_adapter(third), tiny.random_adapter(facts, seed=5))


def test_copies_used_longest_ago_go_first_and_none_that_is_needed(tmp_path: Path) -> None:
    made = []
    for index in range(4):
        path = tmp_path / f"key{index}" / "a.preft"
        path.parent.mkdir()
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 + index, 5000 - index))  # by use, not by when it was written
        made.append(path)
    prune(tmp_path, 400, set())
    assert all(path.exists() for path in made)
    prune(tmp_path, 250, {made[0]})
    assert [path.exists() for path in made] == [True, False, False, True]
    assert not made[1].parent.exists()
    prune(tmp_path, 0, {made[0]})
    assert [path.exists() for path in made] == [True, False, False, False]


def test_what_is_served_again_is_used_again(base: BaseModel, facts: BaseFacts, tmp_path: Path) -> None:
    train(tmp_path / "served" / "a", facts)
    copy = collect(tmp_path / "served", base, tmp_path / "cache", 1 << 30).adapters["tone"]
    os.utime(copy, (1000, copy.stat().st_mtime))
    collect(tmp_path / "served", base, tmp_path / "cache", 0)
    assert copy.exists(), "it is needed"
    assert copy.stat().st_atime > 1000


def test_collect_refuses_both_of_one_name(base: BaseModel, facts: BaseFacts, tmp_path: Path) -> None:
    train(tmp_path / "served" / "a", facts)
    write_adapter(tmp_path / "served" / "tone.preft", tiny.random_adapter(facts, seed=2))
    write_adapter(tmp_path / "served" / "other.preft", tiny.random_adapter(facts, seed=3))
    collected = collect(tmp_path / "served", base, tmp_path / "cache")
    assert list(collected.adapters) == ["other"]
    assert {path.name for path, _ in collected.rejected} == {"a", "tone.preft"}
    for _, reason in collected.rejected:
        assert str(tmp_path / "served" / "a") in reason
        assert str(tmp_path / "served" / "tone.preft") in reason


def test_collect_refuses_the_base_models_name(base: BaseModel, facts: BaseFacts, tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    write_adapter(tmp_path / "served" / "llama.preft", tiny.random_adapter(facts))
    collected = collect(tmp_path / "served", BaseModel("llama", base.path), tmp_path / "cache")
    assert collected.adapters == {}
    assert "base model's own name" in collected.rejected[0][1]


def test_collect_refuses_another_base(facts: BaseFacts, tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    write_adapter(tmp_path / "served" / "a.preft", tiny.random_adapter(facts))
    other = tiny.save_base(tmp_path / "other", num_hidden_layers=6)
    (_, reason), *rest = collect(tmp_path / "served", other, tmp_path / "cache").rejected
    assert "num_hidden_layers is 12 in the adapter and 6 in the base model" in reason
    assert rest == []


def test_collect_refuses_modules_that_the_base_lacks(base: BaseModel, facts: BaseFacts, tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    adapter = tiny.random_adapter(facts)
    pair = adapter.pairs["model.layers.0.mlp.up_proj"]
    renamed = type(adapter)("lora", adapter.base, {"model.layers.0.mlp.w1": pair})
    write_adapter(tmp_path / "served" / "a.preft", renamed)
    collected = collect(tmp_path / "served", base, tmp_path / "cache")
    assert collected.adapters == {}
    assert "model.layers.0.mlp.w1" in collected.rejected[0][1]


def test_collect_missing_folder(base: BaseModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        collect(tmp_path / "none", base, tmp_path / "cache")
