"""The grid behind `preft train --sweep`: its cells, their names, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preft_cli.config.problems import ConfigErrors
from preft_cli.config.schema import PreftConfig
from preft_cli.training.sweep.cell import rows_key
from preft_cli.training.sweep.run import environments
from tests.unit.sweeps import CONFIG, SECTIONS, grid


def test_every_combination_is_a_run_with_a_folder_named_by_its_values() -> None:
    made = grid("adapter.rank=8,16", "adapter.method=lorap,lorap+direftp", "train.learning_rate=1e-3,2.5e-5")
    assert [cell.name for cell in made.cells][:3] == [
        "rank=8,method=lorap,learning_rate=0.001",
        "rank=8,method=lorap,learning_rate=2.5e-05",
        "rank=8,method=lorap+direftp,learning_rate=0.001",
    ]
    assert len(made.cells) == len({cell.config.output_dir for cell in made.cells}) == 8
    last = made.cells[-1]
    assert last.settings == {"adapter.rank": 16, "adapter.method": "lorap+direftp", "train.learning_rate": 2.5e-5}
    assert (last.config.adapter.rank, last.config.adapter.method) == (16, "lorap+direftp")
    assert last.config.output_dir == Path("runs/my-adapter") / last.name
    assert last.config.eval == CONFIG.eval
    assert made.swept["train.learning_rate"] == [1e-3, 2.5e-5]


def test_keys_that_move_together() -> None:
    made = grid("adapter.rank:adapter.alpha=8:16,64:128")
    assert [(cell.config.adapter.rank, cell.config.adapter.alpha) for cell in made.cells] == [(8, 16), (64, 128)]
    assert made.cells[0].name == "rank=8,alpha=16"


def test_lists_nothing_and_names_that_stand_twice() -> None:
    made = grid(
        "adapter.target_modules=[q_proj,v_proj],all-linear", "train.max_steps=null,3", "adapter.use_rslora=true"
    )
    assert made.cells[0].name == "target_modules=q_proj+v_proj,max_steps=null,use_rslora=true"
    assert made.cells[0].config.adapter.target_modules == ["q_proj", "v_proj"]
    assert made.cells[-1].settings["train.max_steps"] == 3
    assert grid("train.file=a/b.jsonl").cells[0].name == "file=a-b.jsonl"


@pytest.mark.parametrize(
    ("sweeps", "choose", "said"),
    [
        (["adapter.rank"], [], "expected key=value,value, such as adapter.rank=8,16,32"),
        (["adapter.rank="], [], "expected single values with commas between them"),
        (["adapter.rank=8,,16"], [], "expected single values with commas between them"),
        (["adapter.rank=8,[16"], [], "expected single values"),
        (["adapter.rank=8,{a: 1}"], [], "expected single values"),
        (["rank=8,16"], [], "rank: expected section.key=value,value"),
        (["adapter.rnak=8,16"], [], "adapter.rnak: unknown key (did you mean rank?)"),
        (["adaptr.rank=8"], [], "adaptr: unknown key (did you mean adapter?)"),
        (["adapter.rank.low=8"], [], "expected section.key=value,value"),
        (["adapter.rank=8,0"], [], "adapter.rank: must be more than 0, found 0"),
        (["adapter.method=lorap,lorra"], [], "(did you mean lora?)"),
        (["adapter.rank=8", "adapter.rank=16"], [], "adapter.rank is swept twice"),
        (["adapter.rank:adapter.alpha=8:16", "adapter.alpha=4"], [], "adapter.alpha is swept twice"),
        (["adapter.rank:adapter.alpha=8,16"], [], "such as 64:64,320:320"),
        (["adapter.rank=8,8"], [], "the value 8 is named twice"),
        (["train.learning_rate=1e-3,0.001"], [], "a value is named twice: learning_rate=0.001"),
        (["train.file=a/b,a-b"], [], "two runs would have the folder file=a-b"),
        (["train.file=" + "x" * 300], [], "the folder's name would be too long"),
        (["adapter.name=a,b"], [], "adapter.name cannot be swept: all cells train the adapter of this name"),
        (["train.output_dir=a,b"], [], "train.output_dir cannot be swept: the cells' folders lie in it"),
        (["train.max_length=64,128"], [], "losses on different rows do not compare"),
        (["train.log_every=1,2"], [], "it does not change what is trained"),
        (["train.save_every=1,2"], [], "how often runs are evaluated is train.eval_every"),
        (["eval.file=a,b"], [], "a sweep is of keys of adapter and train"),
        (["project.name=a,b"], [], "a sweep is of keys of adapter and train, and of project.seed"),
        (["project.seed=0,-1"], [], "project.seed: must be 0 or more"),
        (["project.seed=" + ",".join(map(str, range(200))), "adapter.rank=" + ",".join(map(str, range(1, 100)))], [],
         "19800 runs are too many"),
        (["adapter.rank=8"], ["train.learning_rate"], "--choose train.learning_rate: is not swept; swept are: adapter.rank"),
        (["adapter.rank:adapter.alpha=8:16"], ["adapter.alpha"], "choose adapter.rank:adapter.alpha"),
        (["project.seed=0,1"], ["project.seed"], "a seed is not chosen"),
        (["adapter.rank=8"], ["adapter.rank", "adapter.rank"], "is given twice"),
    ],
)  # fmt: skip
def test_bad_sweeps(sweeps: list[str], choose: list[str], said: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        grid(*sweeps, choose=tuple(choose))
    assert refused.value.exit_code == 2
    [problem] = refused.value.problems
    assert said in str(problem)


def test_all_bad_values_are_told_at_once() -> None:
    with pytest.raises(ConfigErrors) as refused:
        grid("adapter.rank=0,8,x", "train.learning_rate=-1,1e-3")
    assert [problem.text.partition(":")[0] for problem in refused.value.problems] == [
        "adapter.rank", "train.learning_rate", "adapter.rank",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "choose", "said"),
    [
        ({"train": {}}, ("adapter.rank",), "train.validation_file is not set"),
        ({"eval": {}}, (), "eval.file is not set: a sweep compares the losses on held-out conversations"),
    ],
)
def test_a_sweep_without_the_rows_that_it_needs(missing: dict[str, Any], choose: tuple[str, ...], said: str) -> None:
    config = PreftConfig.model_validate(SECTIONS | missing)
    with pytest.raises(ConfigErrors, match=said):
        grid("adapter.rank=8,16", choose=choose, config=config)


def test_which_runs_share_their_rows() -> None:
    def keys(*sweeps: str) -> int:
        return len({rows_key(cell.config) for cell in grid(*sweeps).cells})

    assert (
        keys("adapter.rank=8,16", "adapter.method=lora,direftp", "project.seed=0,1", "train.learning_rate=1e-3,1") == 1
    )
    assert keys("train.file=a,b", "adapter.rank=8,16") == 2


def test_threads_and_gpus_are_shared_out() -> None:
    assert environments(2, [], 4) == [{"OMP_NUM_THREADS": "2"}] * 2
    assert environments(3, ["0"], 2) == [{"OMP_NUM_THREADS": "1"}] * 3
    pinned = environments(3, ["GPU-a", "GPU-b"], 30)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in pinned] == ["GPU-a", "GPU-b", "GPU-a"]
