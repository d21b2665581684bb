"""pyreft folders: read as pyreft computes them, and whatever else they may hold refused by name."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from preft_cli.adapters.base import BaseFacts, Loaded
from preft_cli.adapters.pyreft.read import load_pyreft
from preft_cli.adapters.pyreft.told import Told
from preft_cli.adapters.pyreft.weights import BASE, BIAS, ORIGINAL, PROJECTION, W1, orthonormal
from preft_cli.errors import UserError
from preft_cli.models import BaseModel
from tests import pyreft_fixture as fixture
from tests.reference import MaskedReference
from tests.unit import tiny_llama
from tests.unit.test_adapters_peft import Touch

KINDS = ("direft", "nodireft")


@pytest.fixture(scope="module")
def facts() -> BaseFacts:
    return BaseFacts.of(fixture.BASE)


@pytest.fixture(scope="module")
def reference() -> MaskedReference:
    return MaskedReference(fixture.BASE.path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the DiReFT adapter that a test may spoil."""
    return fixture.copy("direft", tmp_path / "tone")


def load(folder: Path, facts: BaseFacts, *told: Any) -> Loaded:
    return load_pyreft(folder, facts, Told(*(told or ("prompt",))))


def same(first: Loaded, second: Loaded) -> bool:
    return first.adapter.digest() == second.adapter.digest()


@pytest.mark.parametrize("positions", ["prompt", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_pyrefts_own(
    facts: BaseFacts, reference: MaskedReference, kind: str, positions: str
) -> None:
    adapter = load(fixture.FOLDER / kind, facts, positions).adapter
    assert (adapter.method, adapter.rank, adapter.dtype) == (
        {"prompt": "direftp", "all": "direft"}[positions],
        4,
        "float32",
    )
    assert list(adapter.pairs) == ["model.layers.0.residual", "model.layers.2.residual"]
    for case in fixture.EXPECTED[kind]:
        prompt, completion = case["prompt_ids"], case[positions]["completion_ids"]
        adapted = {"prompt": len(prompt), "all": len(prompt) + len(completion)}
        found = reference.logprobs(prompt, completion, adapter, adapted.pop(positions))
        assert (found - torch.tensor(case[positions]["logprobs"])).abs().max() < 1e-4, len(prompt)
        other = reference.logprobs(prompt, completion, adapter, *adapted.values())
        assert (found - other).abs().max() > 1, "the positions matter here"


@pytest.mark.parametrize(("hidden", "rank"), [(48, 5), (48, 1), (12, 11), (12, 12)])
def test_the_orthogonal_weight_is_torchs_own(hidden: int, rank: int) -> None:
    layer = torch.nn.Linear(rank, hidden, bias=False)
    torch.nn.utils.parametrizations.orthogonal(layer)
    with torch.no_grad():
        layer.parametrizations.weight.original.add_(torch.randn(hidden, rank).tril(-1))
    state = layer.state_dict()
    found = orthonormal(state["parametrizations.weight.original"], state["parametrizations.weight.0.base"])
    assert torch.equal(found, layer.weight)
    torch.testing.assert_close(found.T @ found, torch.eye(rank))


@pytest.mark.parametrize("component", ["block_output", "model.layers[{}].output"])
@pytest.mark.parametrize("dots", [False, True])
def test_names_of_all_versions(facts: BaseFacts, folder: Path, dots: bool, component: str) -> None:
    """pyvene until 0.1.6 has dots in the names; a component that names a module may have any number in the field `layer`."""
    keys, representations = [], []
    for layer, file in ((0, fixture.FIRST), (2, fixture.LAST)):
        place = component.format(layer)
        words = ([f"layer.{layer}"] if place == component else []) + [f"comp.{place}.unit.pos.nunit.1#0"]
        keys.append(".".join(words) if dots else ".".join(words).replace(".", "_"))
        representations.append([layer if place == component else 0, place, "pos", 1, 4, *[None] * 8])
        (folder / file).rename(folder / f"intkey_{keys[-1]}.bin")
    fixture.edit(folder, sorted_keys=keys, representations=representations)
    assert same(load(folder, facts), load(fixture.FOLDER / "direft", facts))
    (folder / "config.json").unlink()
    assert same(load(folder, facts, "prompt", "direft"), load(fixture.FOLDER / "direft", facts))


@pytest.mark.parametrize("kind", KINDS)
def test_half_types_become_float32_exactly(facts: BaseFacts, tmp_path: Path, kind: str) -> None:
    """pyreft's default: sources in bfloat16, the orthogonal parametrisation in float32."""
    folder = fixture.copy(kind, tmp_path / "a")

    def halve(tensors: Any) -> None:
        for name in {W1, BIAS, PROJECTION} & tensors.keys():
            tensors[name] = tensors[name].bfloat16()

    fixture.edit_tensors(folder, halve)
    pairs, before = load(folder, facts).adapter.pairs, load(fixture.FOLDER / kind, facts).adapter.pairs
    pair, was = (both["model.layers.0.residual"] for both in (pairs, before))
    assert {tensor.dtype for one in pairs.values() for tensor in one.tensors.values()} == {torch.float32}
    assert torch.equal(pair.a, was.a.bfloat16().float())
    assert torch.equal(pair.b, was.b if kind == "direft" else was.b.bfloat16().float())


def test_a_bias_that_nodireft_never_adds(facts: BaseFacts, tmp_path: Path) -> None:
    folder = fixture.copy("nodireft", tmp_path / "a")
    fixture.edit_tensors(folder, lambda tensors: tensors.update({"proj_layer.bias": torch.ones(4)}))
    assert same(load(folder, facts), load(fixture.FOLDER / "nodireft", facts))


def test_the_rank_is_that_of_the_tensors(facts: BaseFacts, folder: Path) -> None:
    fixture.edit_entry(folder, 4, 8)
    loaded = load(folder, facts)
    assert loaded.adapter.rank == 4
    assert "layer 0: config.json says rank 8, the tensors have 4, which counts" in loaded.warnings

    def cut(tensors: Any) -> None:
        tensors.update({W1: tensors[W1][:2], BIAS: tensors[BIAS][:2], ORIGINAL: tensors[ORIGINAL][:, :2]})

    fixture.edit_tensors(folder, cut, fixture.LAST)
    assert [pair.rank for pair in load(folder, facts).adapter.pairs.values()] == [4, 2]


def test_without_a_config_the_class_is_asked_for(facts: BaseFacts, tmp_path: Path) -> None:
    for kind, other in (KINDS, KINDS[::-1]):
        folder = fixture.copy(kind, tmp_path / kind)
        (folder / "config.json").unlink()
        torch.save({}, folder / "pytorch_model.bin")  # as the trainer writes it
        with pytest.raises(
            UserError, match=r"config\.json is missing.*--intervention direft .* or --intervention nodireft"
        ):
            load(folder, facts)
        loaded = load(folder, facts, "prompt", kind)
        assert same(loaded, load(fixture.FOLDER / kind, facts))
        assert loaded.adapter.meta["pyreft"] == {"interventions": [kind], "positions": "prompt"}
        with pytest.raises(UserError, match=rf"is missing, which {other} has"):
            load(folder, facts, "prompt", other)
        with pytest.raises(UserError, match=f"says {kind}, and --intervention says {other}"):
            load(fixture.FOLDER / kind, facts, "prompt", other)


OF = "<class 'pyreft.interventions.{}'>"


@pytest.mark.parametrize(
    ("of_type", "message"),
    [
        (OF.format("LoreftIntervention"), r"LoReFT computes h \+ R\^T \(W h \+ b - R h\); only DiReFT and NoDiReFT"),
        (OF.format("NoreftIntervention"), "NoReFT computes"),
        (OF.format("ConsreftIntervention"), "ConsReFT computes"),
        (OF.format("LobireftIntervention"), "LobiReFT adds the same vector"),
        (
            "<class 'pyvene.models.interventions.RotatedSpaceIntervention'>",
            "class .*RotatedSpaceIntervention.* are not known",
        ),
        ("<class '__main__.DireftIntervention'>", "class '__main__.DireftIntervention'>\" are not known"),
        (None, "interventions of the type null are not known"),
        (1, "interventions of the type 1 are not known"),
        ("Foo", 'interventions of the type "Foo" are not known'),
        (["<class 'x'>"], r"interventions of the type \[\"<class 'x'>\"\] are not known"),
    ],
)
def test_other_classes_are_refused_by_name(facts: BaseFacts, folder: Path, of_type: Any, message: str) -> None:
    fixture.edit(folder, intervention_types=[OF.format("DireftIntervention"), of_type])
    with pytest.raises(UserError, match=message):
        load(folder, facts)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, 1, "sorted_keys has 'layer_0_comp_block_output.*' where representations has layer 1"),
        (0, "0", "component 'block_output'"),
        (0, -1, "component 'block_output'"),
        (
            1,
            "attention_output",
            "component 'attention_output' .*is not served; DiReFT acts on what a decoder block gives out",
        ),
        (1, "model.layers[0].mlp.output", "is not served"),
        (
            1,
            "transformer.layers[0].output",
            "acts in transformer.layers, and the decoder blocks of .* are model.layers",
        ),
        (
            1,
            "base_model.model.model.layers[0].output",
            "inside a PEFT model, so that it was trained together with a LoRA",
        ),
        (2, "h.pos", "unit 'h.pos' is not served"),
        (7, [[0, 2], [2, 4]], "subspace_partition .* is not served"),
        (8, 0, "group_key 0 of layer_0.* is not served"),
        (10, 0, "moe_key 0 of layer_0.* is not served"),
        (12, True, "hidden_source_representation True"),
    ],
)
def test_other_places_are_refused(facts: BaseFacts, folder: Path, index: int, value: Any, message: str) -> None:
    fixture.edit_entry(folder, index, value)
    with pytest.raises(UserError, match=message):
        load(folder, facts)


def test_tied_weights_are_whole_in_each_file(facts: BaseFacts, folder: Path) -> None:
    fixture.edit_entry(folder, 9, 0)  # intervention_link_key
    assert same(load(folder, facts), load(fixture.FOLDER / "direft", facts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "serial"}, "the mode 'serial' is not served"),
        ({"sorted_keys": ["layer_0_comp_block_output_unit_pos_nunit_1#0"]}, "must be lists of one length"),
        ({"representations": None}, "not one that pyreft's save writes"),
        ({"representations": [[0], [2]]}, "not of pyvene's form"),
        ({"sorted_keys": ["../../x", "y"]}, r"the key '\.\./\.\./x' leaves the folder"),
        ({"sorted_keys": ["x", "y"]}, r"intkey_x\.bin is missing"),
    ],
)
def test_configs_that_cannot_be(facts: BaseFacts, folder: Path, changes: dict[str, Any], message: str) -> None:
    fixture.edit(folder, **changes)
    with pytest.raises(UserError, match=message):
        load(folder, facts)


def test_two_interventions_behind_one_layer(facts: BaseFacts, folder: Path) -> None:
    """Other weights for the first than for the last positions."""
    config = json.loads((folder / "config.json").read_text())
    key = config["sorted_keys"][0]
    (folder / fixture.LAST).rename(folder / f"intkey_{key.replace('#0', '#1')}.bin")
    fixture.edit(folder, sorted_keys=[key, key.replace("#0", "#1")], representations=[config["representations"][0]] * 2)
    with pytest.raises(UserError, match=r"#0\.bin and .*#1\.bin both act behind layer 0, as pyreft's first and last"):
        load(folder, facts)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="both act behind layer 0"):
        load(folder, facts, "prompt", "direft")


def test_missing_and_foreign_files(facts: BaseFacts, folder: Path) -> None:
    (folder / "intkey_other.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"intkey_other\.bin is not named in config\.json"):
        load(folder, facts)
    (folder / "intkey_other.bin").rename(folder / "config.bak")
    (folder / fixture.LAST).unlink()
    with pytest.raises(UserError, match=r"tone: intkey_layer_2.* is missing"):
        load(folder, facts)
    (folder / "config.json").unlink()
    (folder / fixture.FIRST).rename(folder / "intkey_mine.bin")
    with pytest.raises(UserError, match=r"intkey_mine\.bin: its name does not tell where it acts"):
        load(folder, facts, "prompt", "direft")


def test_a_pickle_with_code_is_never_executed(facts: BaseFacts, folder: Path, tmp_path: Path) -> None:
    (folder / fixture.FIRST).write_bytes(pickle.dumps({W1: Touch(str(tmp_path / "executed"))}))
    with pytest.raises(UserError, match="nothing in it was executed"):
        load(folder, facts)
    torch.save(OrderedDict({W1: Touch(str(tmp_path / "executed"))}), folder / fixture.FIRST)
    with pytest.raises(UserError, match="nothing in it was executed"):
        load(folder, facts)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_half_written_files(facts: BaseFacts, folder: Path, keep: int) -> None:
    (folder / fixture.LAST).write_bytes((folder / fixture.LAST).read_bytes()[:keep])
    with pytest.raises(UserError, match=r"intkey_layer_2.*(truncated|damaged)"):
        load(folder, facts)


def loreft(tensors: Any) -> dict[str, torch.Tensor]:
    return {"weight": tensors[W1], "bias": tensors[BIAS], "rotate_layer": tensors[ORIGINAL]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (loreft, "LoReFT computes"),
        (lambda t: {k: v for k, v in t.items() if k != BIAS}, r"learned_source\.bias is missing, which direft has"),
        (lambda t: t.update(extra=torch.ones(1)), "it holds extra, which direft has not"),
        (lambda t: t.update({W1: t[W1][:3]}), r"do not belong together .*learned_source\.weight \[3, 64\]"),
        (lambda t: t.update({W1: t[W1][0]}), "do not belong together"),
        (lambda t: t.update({BASE: t[BASE][:, :4]}), r"weight\.0\.base \[64, 4\]"),
        (lambda t: t.update({W1: t[W1] * torch.nan}), r"learned_source\.weight holds values that are not finite"),
        (lambda t: t.update({ORIGINAL: t[ORIGINAL] / 0}), "the training diverged"),
        (lambda t: t.update({BIAS: t[BIAS].int()}), "not finite numbers"),
        (lambda t: [1], "does not hold a plain dictionary of tensors"),
    ],
)
def test_tensors_that_cannot_be(facts: BaseFacts, folder: Path, change: Any, message: str) -> None:
    fixture.edit_tensors(folder, change)
    with pytest.raises(UserError, match=message):
        load(folder, facts)


def test_trained_base_weights_are_refused(facts: BaseFacts, folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    load(folder, facts)
    for size in (4, 4096):
        torch.save({"model.norm.weight": torch.ones(size)}, folder / "pytorch_model.bin")
        with pytest.raises(UserError, match=r"pytorch_model\.bin holds parameters of the base model that were trained"):
            load(folder, facts)


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_trained_base_weights_in_other_forms_are_refused(facts: BaseFacts, folder: Path, file: str) -> None:
    path = folder / file

    def write(**tensors: torch.Tensor) -> None:
        if file.endswith(".json"):
            path.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}))
        else:
            save_file(tensors, path)

    write()
    load(folder, facts)
    for size in (4, 4096):
        write(**{"model.norm.weight": torch.ones(size)})
        with pytest.raises(UserError, match=rf"tone: {file} holds parameters of the base model that were trained"):
            load(folder, facts)
    path.write_bytes(b"half")
    with pytest.raises(UserError, match=rf"{file} is (truncated|not valid JSON)"):
        load(folder, facts)


def test_weight_decay_that_has_emptied_the_weight(facts: BaseFacts, folder: Path) -> None:
    """In pyreft too, a sign that is less than 1 counts as 0."""

    def decay(tensors: Any, count: int = 4) -> None:
        tensors[ORIGINAL].diagonal()[:count] *= 0.9994

    fixture.edit_tensors(folder, lambda t: decay(t, 1))
    assert any("layer 0: 1 of 4 ranks are zero and do nothing" in note for note in load(folder, facts).warnings)
    fixture.edit_tensors(folder, decay)
    assert any("layer 0: 4 of 4 ranks" in note for note in load(folder, facts).warnings)
    fixture.edit_tensors(folder, decay, fixture.LAST)
    with pytest.raises(UserError, match=r"its W2 is zero everywhere.*Weight decay.*train again with weight_decay 0"):
        load(folder, facts)


def record(folder: Path, **args: Any) -> None:
    (folder / "args.json").write_text(json.dumps(args))


def test_positions_are_asked_for(facts: BaseFacts, folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"does not record at which positions.*--positions prompt .*direftp.*--positions all"
    ):
        load(folder, facts, None)
    assert (
        "--positions prompt changes what this adapter computes if it was trained at others"
        in load(folder, facts).warnings[0]
    )
    record(folder, position="f3+l3", act_fn=None, model="meta/base")
    with pytest.raises(UserError, match=r"trained at the first 3 and the last 3 prompt tokens \(f3\+l3\)"):
        load(folder, facts, None)
    loaded = load(folder, facts)
    assert loaded.warnings == [
        "--positions prompt changes what this adapter computes: it was trained at the first 3 and the last 3 prompt tokens "
        "(f3+l3) and will now act on all prompt tokens and no others"
    ]
    assert loaded.adapter.meta == {
        "source": "pyreft",
        "base_model": "meta/base",
        "pyreft": {"interventions": ["direft"], "positions": "prompt", "trained_at": "f3+l3"},
    }
    with pytest.raises(
        UserError,
        match=r"tone: --positions all .* trained at the first 3 and the last 3 prompt tokens \(f3\+l3\).*--positions prompt",
    ):
        load(folder, facts, "all")
    (folder / "args.json").unlink()
    assert "will now act on all tokens" in load(folder, facts, "all").warnings[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"act_fn": "relu"}, r"activation function 'relu' \(args\.json\), and DiReFT is served without one"),
        ({"use_lora": True}, "trained together with a LoRA"),
    ],
)
def test_what_the_example_script_recorded(facts: BaseFacts, folder: Path, args: dict[str, Any], message: str) -> None:
    record(folder, **args)
    with pytest.raises(UserError, match=message):
        load(folder, facts)
    # A checkpoint lies in the folder of its run.
    inner = folder.parent / "intervenable_model"
    (folder / "args.json").rename(folder.parent / "args.json")
    folder.rename(inner)
    with pytest.raises(UserError, match=message):
        load(inner, facts)


def test_what_is_not_recorded_is_said(facts: BaseFacts, folder: Path) -> None:
    assert any(
        "act_fn); it is taken as linear, as pyreft's own loader does" in note for note in load(folder, facts).warnings
    )
    record(folder, act_fn="linear", model="other/model", position=3)
    notes = load(folder, facts).warnings
    assert not any("act_fn" in note for note in notes)
    assert any("it records the base model 'other/model'" in note for note in notes)
    (folder / "args.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load(folder, facts)


def test_another_base_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 64 inputs and 64 outputs in the adapter, 16 and 16 in"):
        load(folder, BaseFacts.of(tiny_llama.save_base(tmp_path / "narrow")))
    short = tiny_llama.save_base(tmp_path / "short", hidden_size=64, num_hidden_layers=2)
    with pytest.raises(UserError, match=r"it adapts layer 2 and .* has 2 layers"):
        load(folder, BaseFacts.of(short))


def test_an_architecture_whose_residual_stream_is_not_known(folder: Path) -> None:
    mistral = BaseModel("mistral", fixture.BASE.path)
    facts = BaseFacts.of(mistral)._replace(streams={})
    with pytest.raises(UserError, match=r"cannot act on mistral: .*model\.residual_stream: true"):
        load(folder, facts)
