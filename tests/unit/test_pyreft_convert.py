"""pyreft folders on their way through `preft convert`, and what a server makes of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.adapter import Adapter
from engine_patch.errors import PreftError
from engine_patch.store import read_adapter, read_header, write_adapter
from preft_cli.adapters.base import BaseFacts
from preft_cli.adapters.pyreft.read import load_pyreft
from preft_cli.adapters.pyreft.told import Told
from preft_cli.adapters.sources import default_name, detect, find
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.collect import Collected, collect
from preft_cli.convert.results import ConvertResult
from preft_cli.convert.run import convert, plan_convert
from preft_cli.errors import UserError
from preft_cli.models import BaseModel
from preft_cli.models.modules import modules_of
from preft_cli.serving.plan import plan_serve
from preft_cli.store.info import describe
from tests import pyreft_fixture as fixture
from tests.reference import random_adapter
from tests.unit import tiny_llama

CONFIG = PreftConfig.model_validate({"model": {"base": fixture.BASE.name}})
PROMPT, ALL = Told("prompt"), Told("all")


@pytest.fixture(scope="module")
def facts() -> BaseFacts:
    return BaseFacts.of(fixture.BASE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fixture.copy("direft", tmp_path / "tone")


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT LoRA for the same base model."""
    path = tmp_path_factory.mktemp("peft") / "lora"
    tiny_llama.save_peft(path, fixture.BASE)
    return path


def one(result: ConvertResult) -> Any:
    assert not result.failed, result.failed
    (item,) = result.converted
    return item


def reason(result: ConvertResult) -> str:
    assert not result.converted
    (failed,) = result.failed
    return failed.reason


def test_positions_become_the_method(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "--positions prompt" in reason(convert([folder], CONFIG, tmp_path))
    for told, method in ((PROMPT, "direftp"), (ALL, "direft")):
        item = one(convert([folder], CONFIG, tmp_path, told=told, name=method))
        assert (item.method, item.rank, item.dtype) == (method, 4, "float32")
        assert "changes what this adapter computes if" in capfd.readouterr().err
        stored = read_adapter(Path(item.path))
        assert (stored.method, stored.meta["source"]) == (method, "pyreft")
        assert stored.meta["pyreft"] == {"interventions": ["direft"], "positions": told.positions}


def test_stored_tensors_are_those_that_were_read(facts: BaseFacts, folder: Path, tmp_path: Path) -> None:
    read = load_pyreft(folder, facts, PROMPT).adapter
    item = one(convert([folder], CONFIG, tmp_path, told=PROMPT))
    assert item.digest == read.digest()
    half = PreftConfig.model_validate({"model": {"base": fixture.BASE.name}, "convert": {"dtype": "bfloat16"}})
    assert one(convert([folder], half, tmp_path, told=PROMPT)).digest == read.to("bfloat16").digest()


def test_other_positions_are_another_conversion(folder: Path, tmp_path: Path) -> None:
    statuses = [
        one(convert([folder], CONFIG, tmp_path, told=told)).status for told in (PROMPT, PROMPT, ALL, ALL, PROMPT)
    ]
    assert statuses == ["converted", "unchanged", "converted", "unchanged", "converted"]
    assert "--positions prompt" in reason(convert([folder], CONFIG, tmp_path)), "said anew each time"
    (folder / "args.json").write_text(json.dumps({"position": "f1"}))
    assert one(convert([folder], CONFIG, tmp_path, told=PROMPT)).status == "converted"


def test_check_against_the_source(facts: BaseFacts, folder: Path, lora: Path, tmp_path: Path) -> None:
    for told in (PROMPT, ALL):
        convert([folder], CONFIG, tmp_path, told=told)
        assert one(convert([folder], CONFIG, tmp_path, check=True)).status == "checked"
    assert one(convert([], CONFIG, tmp_path, check=True)).name == "tone", "the whole store"
    fixture.edit_tensors(folder, lambda tensors: tensors["learned_source.bias"].add_(1))
    assert "holds other weights than" in reason(convert([folder], CONFIG, tmp_path, check=True))
    convert([lora], CONFIG, tmp_path, name="tone")
    assert "holds other weights than" in reason(convert([folder], CONFIG, tmp_path, check=True)), "other parts"


def test_check_of_a_folder_without_config(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").unlink()
    assert "--intervention direft" in reason(convert([folder], CONFIG, tmp_path, told=PROMPT))
    assert one(convert([folder], CONFIG, tmp_path, told=Told("prompt", "direft"))).status == "converted"
    assert one(convert([folder], CONFIG, tmp_path, check=True)).status == "checked"


def test_a_mixed_folder(lora: Path, tmp_path: Path) -> None:
    many = tmp_path / "many"
    shutil.copytree(lora, many / "lora")
    fixture.copy("direft", many / "direft")
    fixture.copy("nodireft", many / "nodireft")
    fixture.copy("direft", many / "bad")
    (many / "bad" / fixture.FIRST).unlink()
    result = convert([many], CONFIG, tmp_path, told=PROMPT)
    assert {item.name: item.method for item in result.converted} == {
        "lora": "lora",
        "direft": "direftp",
        "nodireft": "direftp",
    }
    assert [Path(item.source).name for item in result.failed] == ["bad"]
    planned = {item.name: item for item in plan_convert([many], CONFIG, tmp_path, told=PROMPT).items}
    assert (planned["lora"].positions, planned["direft"].positions) == (None, "prompt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"told": PROMPT, "check": True}, "it takes no --positions"),
        ({"told": PROMPT, "method": "direft"}, "--method direft and --positions prompt do not agree"),
        ({"told": ALL, "method": "lorap"}, "--method lorap and --positions all do not agree"),
    ],
)
def test_options_that_contradict(folder: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        plan_convert([folder], CONFIG, tmp_path, **options)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(("told", "option"), [(PROMPT, "--positions"), (Told(None, "direft"), "--intervention")])
def test_positions_are_for_pyreft_folders(lora: Path, tmp_path: Path, told: Told, option: str) -> None:
    with pytest.raises(UserError, match=f"{option} is for pyreft folders, and there is none") as error:
        plan_convert([lora], CONFIG, tmp_path, told=told)
    assert error.value.exit_code == 2


def test_methods_of_other_parts_are_refused(folder: Path, lora: Path, tmp_path: Path) -> None:
    found = convert([folder], CONFIG, tmp_path, told=PROMPT, method="lorap")
    assert "is a direftp adapter, and --method lorap acts elsewhere in the model; it can be direft or dire" in reason(
        found
    )
    found = convert([lora], CONFIG, tmp_path, method="direftp")
    assert "is a lora adapter, and --method direftp acts elsewhere in the model; it can be lora or lorap" in reason(
        found
    )
    assert one(convert([folder], CONFIG, tmp_path, told=PROMPT, method="direftp")).method == "direftp"
    assert "--positions prompt" in reason(convert([folder], CONFIG, tmp_path, method="direftp")), "still not recorded"


def test_a_stored_adapter_can_act_elsewhere(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    item = one(convert([folder], CONFIG, tmp_path, told=PROMPT))
    capfd.readouterr()
    assert one(convert([Path(item.path)], CONFIG, tmp_path, method="direft", name="all")).method == "direft"
    assert "will now act on all tokens" in capfd.readouterr().err


def test_no_way_to_peft_is_that_items_failure(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(out: Path, adapter: Adapter) -> list[Path]:
        raise UserError(f"{adapter.method} has no form in PEFT")

    monkeypatch.setattr("preft_cli.adapters.peft_out.write_peft", refuse)
    found = convert([folder], CONFIG, tmp_path, told=PROMPT, to="peft", out=tmp_path / "out")
    assert reason(found) == "direftp has no form in PEFT"


def test_runs_of_pyrefts_trainer(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "checkpoint-20"
    run.mkdir(parents=True)
    folder.rename(run / "intervenable_model")
    for path in (run, run.parent):
        (source,) = find(path)
        assert (source.path, source.kind, default_name(source)) == (
            run / "intervenable_model",
            "pyreft",
            "checkpoint-20",
        )
    assert detect(run / "intervenable_model") == "pyreft"
    (item,) = plan_convert([run], CONFIG, tmp_path, told=PROMPT, to="peft", out=tmp_path / "out").items
    assert item.path == str(tmp_path / "out")


def test_a_server_lists_them_with_the_reason(facts: BaseFacts, tmp_path: Path) -> None:
    served = tmp_path / "served"
    fixture.copy("direft", served / "raw")
    write_adapter(served / "done.preft", load_pyreft(served / "raw", facts, PROMPT).adapter)
    collected = collect(served, fixture.BASE, tmp_path / "cache")
    assert {name: header.method for name, header in collected.headers.items()} == {"done": "direftp"}
    ((path, why),) = collected.rejected
    assert path == served / "raw"
    assert "Say where it shall act, in preft convert: --positions prompt" in why


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("adapter_config.json", r"a PEFT LoRA \(adapter_config\.json\)"),
        ("adapter_model.safetensors", r"a PEFT LoRA \(adapter_model\.safetensors\)"),
        ("preft_config.json", r"a trained adapter \(preft_config\.json\)"),
    ],
)
def test_two_kinds_in_one_folder_are_refused(folder: Path, tmp_path: Path, file: str, kind: str) -> None:
    """Either alone would be served as if the other were not there."""
    (folder / file).write_text("{}")
    expected = rf"holds {kind} and pyreft interventions \(intkey_layer_0.*move each into a folder of its own"
    with pytest.raises(UserError, match=f"tone {expected}"):
        detect(folder)
    assert re.search(expected, reason(convert([folder], CONFIG, tmp_path, told=PROMPT)))
    assert re.search(expected, reason(convert([folder.parent / "ton*"], CONFIG, tmp_path, told=PROMPT)))
    ((path, why),) = collect_alone(folder, tmp_path).rejected
    assert path.name == "tone"
    assert re.search(expected, why)


def collect_alone(folder: Path, tmp_path: Path) -> Collected:
    """What a server makes of a store with `folder` in it and nothing else."""
    (tmp_path / "served").mkdir()
    folder.rename(tmp_path / "served" / folder.name)
    return collect(tmp_path / "served", fixture.BASE, tmp_path / "cache")


def test_a_lora_around_a_checkpoint_is_refused(folder: Path, lora: Path, tmp_path: Path) -> None:
    run = shutil.copytree(lora, tmp_path / "run")
    folder.rename(run / "intervenable_model")
    with pytest.raises(UserError, match=r"a PEFT LoRA .* and the pyreft adapter intervenable_model/"):
        detect(run)
    ((_, why),) = collect_alone(run, tmp_path).rejected
    assert "a folder holds one adapter" in why


@pytest.mark.parametrize("text", ['{"model_type": "llama"}', "[]", "{"])
def test_a_lora_beside_an_unrelated_config(lora: Path, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(lora, tmp_path / "tone")
    (folder / "config.json").write_text(text)
    assert detect(folder) == "peft"
    assert one(convert([folder], CONFIG, tmp_path)).method == "lora"
    assert list(collect_alone(folder, tmp_path).adapters) == ["tone"]
    (tmp_path / "served" / "tone" / "config.json").write_text('{"representations": []}')
    with pytest.raises(UserError, match=r"pyreft interventions \(config\.json\)"):
        detect(tmp_path / "served" / "tone")


def test_interventions_of_another_base_model(tmp_path: Path, facts: BaseFacts) -> None:
    adapter = load_pyreft(fixture.FOLDER / "direft", facts, PROMPT).adapter
    renamed = {name.replace(".2.", ".3."): pair for name, pair in adapter.pairs.items()}
    (tmp_path / "served").mkdir()
    write_adapter(tmp_path / "served" / "a.preft", Adapter("direftp", adapter.base, renamed))
    collected = collect(tmp_path / "served", fixture.BASE, tmp_path / "cache")
    assert "model.layers.3.residual (64 inputs, 64 outputs) does not exist there" in collected.rejected[0][1]
    found = convert([tmp_path / "served" / "a.preft"], CONFIG, tmp_path)
    assert "it adapts layer 3 and" in reason(found)


def test_an_unknown_architecture_is_served_when_declared(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    path = tmp_path / "mistral"
    MistralForCausalLM(MistralConfig(**tiny_llama.SIZES, num_attention_heads=2, num_key_value_heads=1)).save_pretrained(
        path
    )
    base = BaseModel(str(path), path)
    adapter = random_adapter(modules_of(base, declared=True), base.fingerprint, seed=1, rank=4, method="direftp")
    (tmp_path / "served").mkdir()
    write_adapter(tmp_path / "served" / "a.preft", adapter)
    (_, why), *_ = collect(tmp_path / "served", base, tmp_path / "cache").rejected
    assert "the architecture 'mistral' is not known" in why
    assert list(collect(tmp_path / "served", base, tmp_path / "cache", declared=True).adapters) == ["a"]
    for declared in (False, True):
        model = {"base": str(path), "residual_stream": declared}
        config = PreftConfig.model_validate({"model": model})
        result = convert([tmp_path / "served" / "a.preft"], config, tmp_path)
        assert bool(result.converted) == declared
        arguments = plan_serve(config, tmp_path).arguments("/model", 16, None)
        options = json.loads(arguments[arguments.index("--additional-config") + 1])["preft"]
        assert options.get("residual_stream", False) is declared


def test_a_value_too_large_for_float16_is_named(folder: Path, tmp_path: Path) -> None:
    fixture.edit_tensors(folder, lambda tensors: tensors["learned_source.bias"].mul_(1e6))
    half = PreftConfig.model_validate({"model": {"base": fixture.BASE.name}, "convert": {"dtype": "float16"}})
    assert "b of model.layers.0.residual does not fit float16" in reason(convert([folder], half, tmp_path, told=PROMPT))


def test_the_store_tells_where_it_acts(folder: Path, tmp_path: Path) -> None:
    path = Path(one(convert([folder], CONFIG, tmp_path, told=PROMPT)).path)
    (info,) = describe(path.parent, ["tone"]).adapters
    (group,) = info.modules
    assert (group.module, group.rank, group.scaling, group.layers) == ("model.layers.*.residual", 4, 1.0, "0,2")
    assert (info.method, read_header(path).rank) == ("direftp", 4)
    flipped = bytearray(path.read_bytes())
    flipped[-4096] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(PreftError, match="is damaged"):
        read_adapter(path)


def test_the_command_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from preft_cli.app import app

    monkeypatch.chdir(tmp_path)
    arguments = ["convert", str(folder), "--set", f"model.base={fixture.BASE.path}", "--json"]
    refused = CliRunner().invoke(app, arguments)
    assert (refused.exit_code, "--positions prompt" in json.loads(refused.stdout)["failed"][0]["reason"]) == (1, True)
    done = CliRunner().invoke(app, [*arguments, "--positions", "prompt", "--intervention", "direft"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["converted"][0]["method"] == "direftp"
    assert CliRunner().invoke(app, [*arguments, "--positions", "first"]).exit_code == 2


def test_float32_holds_each_half_type() -> None:
    """What the reader relies on."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for kind in (torch.bfloat16, torch.float16):
        half = values.view(kind)
        assert torch.equal(half.float().to(kind)[half == half], half[half == half])
