"""What the runs of a sweep say together: means over seeds, the choice on validation rows, the table and the picture."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from preft_cli.training.sweep.notes import comparable, notes_of
from preft_cli.training.sweep.plot import lines_of, picture_of
from preft_cli.training.sweep.report import print_sweep, write_files
from preft_cli.training.sweep.result import OverSeeds, SweepResult
from preft_cli.training.sweep.summary import at_edge, points_of
from tests.unit.sweeps import grid, loss, results, swept

RATES = "train.learning_rate=1e-4,1e-3,1e-2"
# By learning rate: what seeds 0 and 1 come to on validation rows, and on held-out rows.
VALIDATION = {1e-4: (3.0, 3.2), 1e-3: (2.0, 2.6), 1e-2: (2.4, 2.1)}
HELD_OUT = {1e-4: (1.0, 1.0), 1e-3: (2.5, 2.9), 1e-2: (2.2, 2.4)}


def chosen_grid() -> Any:
    return grid("adapter.rank=8,16", RATES, "project.seed=0,1", choose=("train.learning_rate",))


def measured(cell: Any) -> tuple[float, float]:
    rate, seed = cell.settings["train.learning_rate"], cell.settings["project.seed"]
    return VALIDATION[rate][seed], HELD_OUT[rate][seed]


def test_means_and_ranges_over_seeds() -> None:
    made = grid("adapter.rank=8,16", "project.seed=0,1,2")
    points = points_of(
        made, results(made, lambda cell: (9, cell.config.adapter.rank + [0.1, 0.5, 0.3][cell.config.project.seed]))
    )
    assert [point.settings for point in points] == [{"adapter.rank": 8}, {"adapter.rank": 16}]
    first = points[0].held_out
    assert first is not None
    assert first.by_seed == {0: 8.1, 1: 8.5, 2: 8.3}
    assert (first.mean, first.low, first.high) == (pytest.approx(8.3), 8.1, 8.5)
    assert (points[0].chosen, points[0].candidates) == ({}, [])


def test_the_choice_goes_by_the_mean_on_validation_rows_alone() -> None:
    made = chosen_grid()
    points = points_of(made, results(made, measured))
    assert len(points) == 2
    # Means 3.1, 2.3, 2.25: the last one, although the second has the lowest seed and the first the lowest held-out loss.
    assert points[0].chosen == {"train.learning_rate": 1e-2}
    assert points[0].held_out == OverSeeds.of({0: 2.2, 1: 2.4})
    assert points[0].at_edge == ["train.learning_rate"]
    means = [candidate.validation.mean for candidate in points[0].candidates if candidate.validation]
    assert means == pytest.approx([3.1, 2.3, 2.25])


def test_a_value_that_fails_for_one_seed_is_not_chosen() -> None:
    made = chosen_grid()

    def diverges(cell: Any) -> tuple[float, float] | None:
        bad = cell.settings["train.learning_rate"] == 1e-2 and cell.settings["project.seed"] == 1
        return None if bad else measured(cell)

    point = points_of(made, results(made, diverges))[0]
    assert point.chosen == {"train.learning_rate": 1e-3}
    assert point.at_edge == [], "a larger one was tried, and was worse"
    assert point.failed == ["rank=8,learning_rate=0.01,seed=1"]
    nothing = points_of(made, results(made, lambda cell: None))[0]
    assert (nothing.chosen, nothing.held_out, nothing.trainable_parameters) == ({}, None, None)
    half = points_of(made, results(made, measured)[:1])[0]
    assert (half.chosen, half.held_out) == ({}, None), "while seeds are left, nothing is chosen"


def test_without_a_choice_the_seeds_that_are_left_are_told() -> None:
    made = grid("project.seed=0,1,2")
    points = points_of(made, results(made, lambda cell: (1, 2) if cell.config.project.seed else None))
    assert points[0].held_out == OverSeeds.of({1: 2, 2: 2})
    assert points[0].failed == ["seed=0"]


def test_method_and_rank_can_be_chosen_too() -> None:
    made = grid("adapter.method=lora,lorap", "adapter.rank=8,16", choose=("adapter.method", "adapter.rank"))
    validation = {"lora": {8: 3, 16: 2.5}, "lorap": {8: 1, 16: 2}}
    [point] = points_of(
        made, results(made, lambda cell: (validation[cell.config.adapter.method][cell.config.adapter.rank], 5))
    )
    assert (point.line, point.method, point.rank, point.trainable_parameters) == ("best method", "lorap", 8, 8000)
    assert point.at_edge == ["adapter.rank"]


def test_edges() -> None:
    assert at_edge(1e-3, [1e-3, 1e-2])
    assert at_edge(4, [4])
    assert not at_edge(8, [4, 8, 16])
    assert not at_edge("lorap", ["lora", "lorap"])
    assert not at_edge(True, [False, True])


@pytest.mark.parametrize(
    ("sweeps", "lines"),
    [
        (["adapter.rank=8,16"], ["lorap"]),
        (["adapter.method=lora,direftp", "adapter.rank:adapter.alpha=8:16,16:32"], ["lora", "direftp"]),
        (["adapter.method:train.learning_rate=lora:1e-3,direftp:1e-2"], ["lora", "direftp"]),
        (["adapter.method:adapter.alpha=lora:1,lora:2"], ["lora, alpha 1", "lora, alpha 2"]),
        (["adapter.target_modules=[q_proj,v_proj],all-linear"],
         ["lorap, target_modules q_proj+v_proj", "lorap, target_modules all-linear"]),
    ],
)  # fmt: skip
def test_names_of_lines(sweeps: list[str], lines: list[str]) -> None:
    made = grid(*sweeps, "project.seed=0,1")
    points = points_of(made, results(made, lambda cell: (1, 2)))
    assert list(dict.fromkeys(point.line for point in points)) == lines


def test_the_marks_of_the_picture() -> None:
    made = grid("adapter.rank=16,8,32", "adapter.method=lora,lorap", "project.seed=0,1")

    def losses(cell: Any) -> tuple[float, float] | None:
        config = cell.config
        return (
            None
            if config.adapter.rank == 32 and config.adapter.method == "lora"
            else (1, config.adapter.rank + config.project.seed)
        )

    lines = lines_of(points_of(made, results(made, losses)), lambda point: point.trainable_parameters)
    assert {line: [mark.x for mark in marks] for line, marks in lines.items()} == {
        "lora": [8000, 16000], "lorap": [8000, 16000, 32000],
    }  # fmt: skip
    assert lines["lora"][0][:4] == (8000, 8.5, 8, 9)


def test_files_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = chosen_grid()
    result = swept(made, results(made, lambda cell: None if cell.name.startswith("rank=16") else measured(cell)))
    write_files(result, tmp_path / "sweep.json")
    assert SweepResult.model_validate_json((tmp_path / "sweep.json").read_text()) == result
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0] | {"held_out_mean": "2.3"} == {
        "line": "lorap", "method": "lorap", "rank": "8", "trainable_parameters": "8000", "train.learning_rate": "0.01",
        "seeds": "2", "held_out_mean": "2.3", "held_out_low": "2.2", "held_out_high": "2.4", "base": "4.0",
        "at_edge": "train.learning_rate", "failed": "0",
    }  # fmt: skip
    assert (rows[1]["seeds"], rows[1]["held_out_mean"], rows[1]["failed"]) == ("0", "", "6")
    capsys.readouterr()
    print_sweep(result)
    printed = capsys.readouterr()
    assert "2.300 (2.200-2.400)  -42.5%" in printed.out
    assert "0.01*" in printed.out
    assert "none" in printed.out
    assert "6 of 12 runs failed: rank=16,learning_rate=0.0001,seed=0" in printed.err
    assert "the best train.learning_rate is the smallest or largest one tried" in printed.err


def drawn(picture: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(found.get_text() for found in picture.findobj(Text))


def test_the_picture_shows_differences_between_methods(tmp_path: Path) -> None:
    made = grid("adapter.rank=8,16", "adapter.method=lora,lorap,lora+direft,lorap+direftp,direft,direftp")

    def picture(low: float) -> str:
        return drawn(picture_of(swept(made, results(made, lambda cell: (1, low + cell.config.adapter.rank / 100)))))

    assert "base model: 4.00, not to scale" in picture(2.0), "or all lines would be one"
    near = picture(3.8)
    assert "not to scale" not in near
    for text in ("base model: 4.00", "lorap+direftp", "Held-out loss over rank", "model, 2 cores of a CPU, 2026-05-14"):
        assert text in near


def test_losses_on_other_rows_do_not_count() -> None:
    made = grid("adapter.rank=8,16")
    first, second = results(made, lambda cell: (1, 2))
    assert comparable([first, second]) == [first, second]
    other = second.model_copy(update={"held_out": loss(2, digest="others")})
    kept, refused = comparable([first, other])
    assert kept == first
    assert (refused.held_out, refused.validation) == (None, None)
    assert "eval.file held other rows than for rank=8" in str(refused.error)
    other = second.model_copy(update={"validation": loss(2, digest="others")})
    assert "train.validation_file held other rows" in str(comparable([first, other])[1].error)
    noted = notes_of([first, second.model_copy(update={"git_commit": "abc"})])
    assert noted == ["the runs are of several commits of preft: None, abc"]
    assert json.loads(first.model_dump_json())["held_out"]["digest"] == "rows"
    assert first.held_out is not None
    quantised = first.model_copy(update={"held_out": first.held_out.model_copy(update={"base": 9.0})})
    assert "the base model's own loss is" in notes_of([first, quantised])[0]
