"""`preft train --sweep` with train.task grpo: accuracies in place of losses, from runs that nobody trained."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preft_cli.config.problems import ConfigErrors
from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.rl.accuracy import HeldOutAccuracy
from preft_cli.rl.result import RlResult
from preft_cli.training import run as training
from preft_cli.training.metrics import Metrics
from preft_cli.training.output import RunFolder
from preft_cli.training.sweep import cell, run
from preft_cli.training.sweep.grid import Grid
from preft_cli.training.sweep.notes import comparable, notes_of
from preft_cli.training.sweep.plan import jobs_problem
from preft_cli.training.sweep.plot_accuracy import picture_of_accuracy
from preft_cli.training.sweep.report import print_sweep, write_files
from preft_cli.training.sweep.result import SweepResult
from preft_cli.training.sweep.run import run_sweep
from tests.unit.rl_runs import held_out, rl_result, write_run
from tests.unit.sweeps import RL_CONFIG, grid

SOLVED = {"lorap": (100, 110, 120), "lora": (104, 112, 114), "direftp": (60, 70, 80)}
"""By method: of 200 problems, by seed."""

Trained = list[str]


def rl_grid(*sweeps: str, config: PreftConfig = RL_CONFIG, **options: Any) -> Grid:
    return grid(*(sweeps or ("adapter.method=lorap,lora,direftp", "project.seed=0,1,2")), config=config, **options)


@pytest.fixture
def trained(fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Which runs were started; in place of training, each writes what `SOLVED` says."""
    names: Trained = []

    def train(config: PreftConfig, root: Path, *, prepared: Any, **_: Any) -> RlResult:
        method, seed = config.adapter.method, config.project.seed
        assert prepared == ("prepared", method, seed), "each run has its own problems and targets"
        names.append(config.output_dir.name)
        if method == "lora+direft":
            raise UserError("no such luck")
        folder = RunFolder((root / config.output_dir).absolute())
        folder.prepare(config, resume=False)
        solved = SOLVED[method][seed]
        write_run(Metrics(folder.metrics), gain=solved / 200 - 0.2, seed=seed)
        changes = {"method": method, "seed": seed, "trainable_parameters": 1000 * config.adapter.rank}
        result = rl_result(folder.path, held_out(solved, constant=75), **changes)
        folder.result.write_text(result.model_dump_json())
        return result

    fake("preft_cli.rl.prepare", prepare_rl=lambda config, _: ("prepared", config.adapter.method, config.project.seed))
    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(run, "setting_problems", lambda _: [])  # they ask for installed packages
    monkeypatch.setattr(cell, "_free_memory", lambda: None)  # or it would load torch
    return names


def test_the_grid_of_an_environment_needs_no_file() -> None:
    made = rl_grid("adapter.method=lorap,lora", "train.grpo.beta=0,0.04", "train.learning_rate=1e-3")
    assert [cell.name for cell in made.cells][:2] == [
        "method=lorap,beta=0,learning_rate=0.001", "method=lorap,beta=0.04,learning_rate=0.001",
    ]  # fmt: skip
    assert made.cells[1].settings["train.grpo.beta"] == made.cells[1].config.train.grpo.beta == 0.04
    assert made.cells[1].config.train.grpo.environment == "gcd"
    assert made.measure.name == "accuracy"
    assert grid("adapter.rank=2,4").measure.name == "loss"


@pytest.mark.parametrize(
    ("sweeps", "choose", "said"),
    [
        (["adapter.rank=8,16"], ["adapter.rank"], "--choose adapter.rank: train.task grpo measures held-out problems only"),
        (["train.task=sft,grpo"], [], "train.task cannot be swept: a loss and an accuracy do not compare"),
        (["train.grpo.environment=gcd,lcm"], [], "accuracies on different problems do not compare"),
        (["train.grpo.worked_examples=0,2"], [], "accuracies on different problems do not compare"),
        (["train.grpo.rewards=[math],[code]"], [], "they decide what counts as solved"),
        (["train.grpo.in_flight=finish,abort"], [], "it does not change what is trained"),
        (["train.grpo.bta=0,1"], [], "unknown key (did you mean beta?)"),
        (["train.grpo.beta.low=0,1"], [], "expected section.key=value,value"),
        (["adapter.grpo.beta=0,1"], [], "expected section.key=value,value"),
        (["train.grpo.beta=0,-1"], [], "train.grpo.beta: must be 0 or more"),
    ],
)  # fmt: skip
def test_what_is_refused(sweeps: list[str], choose: list[str], said: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        rl_grid(*sweeps, choose=tuple(choose))
    [problem] = refused.value.problems
    assert said in str(problem)


def test_without_held_out_problems_there_is_nothing_to_compare() -> None:
    config = PreftConfig.model_validate({"train": {"task": "grpo"}})
    with pytest.raises(ConfigErrors, match=r"neither train\.grpo\.environment nor eval\.file is set"):
        rl_grid("adapter.rank=8,16", config=config)
    sft = PreftConfig.model_validate({"train": {"grpo": {"environment": "gcd"}}})
    with pytest.raises(ConfigErrors, match=r"eval\.file is not set"):
        rl_grid("adapter.rank=8,16", config=sft)


@pytest.mark.parametrize(
    ("grpo", "serve", "said"),
    [
        ({}, {}, "--jobs 2: each run has an engine of its own"),
        ({}, {"gpu_memory_utilization": 0.3}, None),
        ({"rollout_url": "http://localhost:8000", "rollout_store": "/dev/shm/x"}, {}, "sample from each other's"),
    ],
)
def test_runs_that_would_get_in_each_others_way(
    tmp_path: Path, grpo: dict[str, Any], serve: dict[str, Any], said: str | None
) -> None:
    sections = {"train": {"task": "grpo", "grpo": {"environment": "gcd"} | grpo}, "serve": serve}
    made = rl_grid("adapter.rank=8,16", config=PreftConfig.model_validate(sections))
    assert jobs_problem(made, 1) is None
    found = jobs_problem(made, 2)
    if said is None:
        assert found is None
        return
    assert found is not None
    assert said in found
    with pytest.raises(UserError) as error:
        run_sweep(made, tmp_path, jobs=2)
    assert (str(error.value), error.value.exit_code) == (found, 2)
    assert not (tmp_path / "runs").exists()


def test_the_share_of_an_engine_leaves_room_for_training() -> None:
    assert "such as 0.3 for 2 runs" in str(jobs_problem(rl_grid("adapter.rank=8,16"), 2))
    assert "such as 0.1 for 5 runs" in str(jobs_problem(rl_grid("adapter.rank=8,16"), 5))


def test_table_files_and_resume(tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    made = rl_grid()
    result = run_sweep(made, tmp_path)
    assert (len(trained), result.complete, result.measure, result.base) == (9, True, "accuracy", 0.21)
    points = {point.method: point for point in result.points}
    assert list(points) == ["lorap", "lora", "direftp"]
    lorap = points["lorap"].held_out
    assert lorap is not None
    assert lorap.by_seed == {0: 0.5, 1: 0.55, 2: 0.6}
    assert (lorap.mean, lorap.low, lorap.high) == (pytest.approx(0.55), 0.5, 0.6)
    path = tmp_path / "runs/my-adapter/sweep.json"
    assert SweepResult.model_validate_json(path.read_text()) == result

    write_files(result, path)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with path.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0] | {"held_out_mean": "0.55"} == {
        "line": "lorap", "method": "lorap", "rank": "16", "trainable_parameters": "16000", "seeds": "3",
        "held_out_mean": "0.55", "held_out_low": "0.5", "held_out_high": "0.6", "base": "0.21", "at_edge": "", "failed": "0",
        "constant": "0.375",
    }  # fmt: skip
    capsys.readouterr()
    print_sweep(result)
    printed = capsys.readouterr()
    table = {line.split()[0]: line for line in printed.out.splitlines() if line.strip()}
    assert "held-out accuracy" in table["method"]
    assert "21.0%" in table["base"]
    assert "37.5%" in table["always"]
    assert "55.0% (50.0%-60.0%)  +34.0 pts" in table["lorap"]
    assert "2 of 9 runs solve no more than the best constant answer, '3': 37.5%" in printed.err

    trained.clear()
    more = rl_grid("adapter.method=lorap,lora,direftp,lora+direft", "project.seed=0,1,2")
    again = run_sweep(more, tmp_path, resume=True)
    assert trained == [f"method=lora+direft,seed={seed}" for seed in range(3)]
    assert again.cells[:9] == result.cells, "as they were read back"
    assert [cell.error for cell in again.failed] == ["no such luck"] * 3


def test_the_picture(tmp_path: Path, trained: Trained) -> None:
    picture = picture_of_accuracy(run_sweep(rl_grid(), tmp_path))
    bars, rewards, accuracies = picture.axes
    assert [label.get_text() for label in bars.get_xticklabels()] == ["lorap", "lora", "direftp"]
    seeds = [float(one[0].get_ydata()[0]) for one in bars.containers]
    assert seeds == [solved / 200 for method in SOLVED for solved in SOLVED[method]]
    low, high = bars.containers[0][2][0].get_segments()[0][:, 1]
    assert (low, high) == (held_out(100).adapter.low, held_out(100).adapter.high)
    means = [one.get_ydata()[0] for one in bars.get_lines() if one.get_linewidth() == 2.2]
    assert means == pytest.approx([0.55, 0.55, 0.35])
    assert {"base model: 21.0%", "always '3': 37.5%"} <= {one.get_label() for one in bars.get_lines()}
    for axes in (rewards, accuracies):
        assert [one.get_label() for one in axes.get_lines()] == ["lorap", "lora", "direftp"]
    assert [len(one.get_xdata()) for one in rewards.get_lines()] == [60] * 3
    assert list(accuracies.get_lines()[0].get_xdata()) == [0, 20, 40, 60]


def test_methods_of_several_ranks_are_told_apart(tmp_path: Path, trained: Trained) -> None:
    picture = picture_of_accuracy(run_sweep(rl_grid("adapter.rank=8,16", "adapter.method=lorap,lora"), tmp_path))
    assert [label.get_text() for label in picture.axes[0].get_xticklabels()] == [
        "lorap\nrank 8", "lora\nrank 8", "lorap\nrank 16", "lora\nrank 16",
    ]  # fmt: skip
    looks = [(one.get_color(), one.get_linestyle()) for one in picture.axes[1].get_lines()]
    assert len(set(looks)) == 4
    assert looks[0][0] == looks[2][0], "a colour a method"


def test_other_problems_do_not_compare(tmp_path: Path, trained: Trained) -> None:
    first, second = run_sweep(rl_grid("adapter.rank=8,16"), tmp_path).cells
    assert isinstance(second.held_out, HeldOutAccuracy)
    assert notes_of([first, second]) == []
    other = second.model_copy(update={"held_out": held_out(150, digest="other problems")})
    kept, refused = comparable([first, other])
    assert kept == first
    assert refused.held_out is None
    assert str(refused.error).startswith("the held-out problems are others than for rank=8")
    moved = second.model_copy(update={"held_out": held_out(150, base=50)})
    [note] = notes_of([first, moved])
    assert note.startswith(
        "the base model's own accuracy is 21.0% to 25.0%, by type, sampling or the length of answers"
    )


def test_what_older_sweeps_wrote_can_be_read() -> None:
    text = Path("examples/results/sweep-personas.json").read_text()
    old = SweepResult.model_validate_json(text)
    assert (old.measure, old.base) == ("loss", json.loads(text)["base_loss"])
    assert old.measured.held_out == "held-out loss"
    assert old.constant is None
