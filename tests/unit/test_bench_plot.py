"""Pictures and the numbers beside them."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import pytest

from preft_cli.bench import plot
from preft_cli.bench.drawn import rows_of_result, rows_of_sweep
from preft_cli.bench.plot import plot_result, plot_sweep
from preft_cli.bench.plot_result import picture_of_result
from preft_cli.bench.plot_style import COLOURS, MARKERS, title
from preft_cli.bench.plot_sweep import picture_of_sweep
from preft_cli.bench.published import TABLE, published_for
from preft_cli.bench.results import BenchResult, Hardware, Spread
from preft_cli.bench.sweep_result import SweepPoint, SweepResult
from preft_cli.config.schema import Arm
from preft_cli.models import RANDOM_SHAPES
from tests.unit.bench_results import make_config, make_result

SPEEDS = {"base": [10.0, 11, 9], "lora": [4.0, 5, 4.5], "lorap": [8.0, 9, 8.5], "direftp": [9.0, 9, 9]}
PAPER = make_config(arms=list(SPEEDS), num_adapters=512, num_requests=512)


def make_sweep(
    path: Path, values: list[Any], key: str = "num_adapters", base: str = "random:llama-3.1-8b"
) -> SweepResult:
    """A sweep on the disk with the same speeds at each value."""
    points = []
    for value in values:
        result = make_result(SPEEDS, path=path.with_name(f"{value}.json"), config=make_config(base, **{key: value}))
        speeds = {name: arm.requests_per_second for name, arm in result.arms.items()}
        point = SweepPoint(
            value=value, file=f"{value}.json", requests_per_second=speeds, ratios=result.ratios, failures=0, error=None
        )
        points.append(point)
    return SweepResult(key=key, values=values, points=points, path=path)


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def texts(picture: Any) -> str:
    """Everything that is written in a figure."""
    from matplotlib.text import Text

    return "\n".join(found.get_text() for found in picture.findobj(Text))


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_result_has_its_picture_and_the_numbers_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot_result(make_result(SPEEDS, path=tmp_path / "r.json", config=PAPER))
    assert is_png(tmp_path / "r.png")
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", "r.png", "r.csv"}
    rows = {(row["quantity"], row["arm"], row["source"]): row for row in read(tmp_path / "r.csv")}
    lorap = rows["requests_per_second", "lorap", "measured"]
    assert [float(lorap[part]) for part in ("low", "median", "high")] == pytest.approx([8, 8.5, 9])
    assert float(rows["ratio_to_base", "lorap", "measured"]["median"]) == pytest.approx(9 / 11)
    assert float(rows["ratio_to_lora", "base", "measured"]["median"]) == pytest.approx(
        1 / (5 / 11)
    )  # kept as lora/base
    assert float(rows["ratio_to_lora", "direftp", "arXiv 2605.14217"]["median"]) == 2.21
    assert float(rows["ratio_to_lora", "lorap", "arXiv 2605.14217"]["median"]) == 1.83
    assert "picture: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "speeds", "expected"),
    [
        (PAPER, SPEEDS, {"lorap": 1.83, "direftp": 2.21}),
        (PAPER, {arm: SPEEDS[arm] for arm in ("base", "lora", "lorap")}, {"lorap": 1.83}),
        (PAPER, {arm: SPEEDS[arm] for arm in ("base", "lorap")}, {}),  # nothing to be over
        (make_config(num_adapters=64), SPEEDS, {}),
        (make_config("smollm2-135m", num_adapters=512), SPEEDS, {}),
        (make_config("random:qwen2.5-0.5b", num_adapters=512), SPEEDS, {"lorap": 1.63, "direftp": 2.39}),
    ],
)
def test_published_points_only_where_they_match(config: Any, speeds: Any, expected: dict[str, float]) -> None:
    result = make_result(speeds, config=config)
    rows = rows_of_result(result)
    assert {row.arm: row.median for row in rows if not row.measured} == expected
    written = texts(picture_of_result(result, rows))
    assert ("published (arXiv 2605.14217)" in written) == bool(expected)
    assert ("lengths and adapter slots are not public" in written) == bool(expected)


@pytest.mark.parametrize("row", TABLE)
def test_every_published_model_is_one_of_the_shapes(row: Any) -> None:
    assert row.model in RANDOM_SHAPES
    assert published_for(f"random:{row.model}") == row.over_lora
    assert published_for(f"some/folder/{row.model.title()}-Instruct") == row.over_lora


def test_the_picture_says_what_was_measured_on_what() -> None:
    result = make_result(SPEEDS, config=PAPER, created=datetime(2026, 5, 14, tzinfo=UTC))
    assert title(result) == "llama-3.1-8b (random weights), 1 x NVIDIA H200, 2026-05-14"
    cpu = Hardware(cpu="Xeon(R) Gold @ 2.0GHz", cores=2, memory_gib=8.0, gpus=[])
    other = make_result(SPEEDS, config=make_config("smollm2-135m"), device="cpu", hardware=cpu)
    assert title(other) == "smollm2-135m, 2 cores of Xeon Gold, 2026-05-14"
    written = texts(picture_of_result(result, rows_of_result(result)))
    assert title(result) in written
    assert "8.50   0.82 x base" in written
    assert "512 requests, prompts of 64 tokens" in written


def test_latencies_of_an_online_result(tmp_path: Path) -> None:
    result = make_result(SPEEDS, path=tmp_path / "r.json", config=PAPER, ttft_ms=300)
    plot_result(result)
    rows = {(row["quantity"], row["arm"]): row for row in read(tmp_path / "r.csv")}
    assert float(rows["ttft_p99_ms", "lora"]["median"]) == 900
    assert float(rows["tpot_p50_ms", "base"]["median"]) == 10
    written = texts(picture_of_result(result, rows_of_result(result)))
    assert "Time to first token" in written
    assert "Time per output token" in written


@pytest.mark.parametrize("arms", [["base"], ["base", "lorap"], ["base", "lora"], list(get_args(Arm))])
def test_any_arms_can_be_drawn(tmp_path: Path, arms: list[str]) -> None:
    plot_result(make_result({arm: [5.0] for arm in arms}, path=tmp_path / "r.json"))
    assert is_png(tmp_path / "r.png")


def test_an_arm_that_answered_nothing_can_be_drawn(tmp_path: Path) -> None:
    result = make_result(SPEEDS, path=tmp_path / "r.json")
    none = Spread(median=0, low=0, high=0)
    dead = result.arms["lora"].model_copy(update={"requests_per_second": none})
    ratios = result.ratios | {"lora/base": none}
    plot_result(result.model_copy(update={"arms": {"base": dead, "lora": dead}, "ratios": ratios}))
    assert is_png(tmp_path / "r.png")


def test_every_arm_has_a_colour_and_a_marker_of_its_own() -> None:
    for looks in (COLOURS, MARKERS):
        assert set(looks) == set(get_args(Arm))
        assert len(set(looks.values())) == len(looks)


def test_a_sweep_has_its_picture_and_the_numbers_in_it(tmp_path: Path) -> None:
    plot_sweep(make_sweep(tmp_path / "s.json", [1, 8, 64, 512]))
    assert is_png(tmp_path / "s.png")
    rows = read(tmp_path / "s.csv")
    speeds = [row for row in rows if row["quantity"] == "requests_per_second" and row["arm"] == "lorap"]
    assert [int(row["num_adapters"]) for row in speeds] == [1, 8, 64, 512]
    assert [float(row["median"]) for row in speeds] == pytest.approx([8.5] * 4)
    published = {row["arm"]: (row["num_adapters"], row["median"]) for row in rows if row["source"] != "measured"}
    assert published == {"direftp": ("512", "2.21"), "lorap": ("512", "1.83")}


@pytest.mark.parametrize(
    ("key", "base"), [("rank", "random:llama-3.1-8b"), ("num_adapters", "smollm2-135m"), ("gpu_slots", "smollm2-135m")]
)
def test_a_sweep_of_something_else_has_no_published_points(tmp_path: Path, key: str, base: str) -> None:
    swept = make_sweep(tmp_path / "s.json", [4, 8], key, base)
    assert all(row.measured for row in rows_of_sweep(swept, base))


@pytest.mark.parametrize(
    ("key", "values", "scale"),
    [
        ("num_adapters", [1, 8, 64], "log"),
        ("rank", [8, 16, 64], "linear"),
        ("adapter_choice", ["zipf", "uniform"], "linear"),
        ("enable_prefix_caching", [False, True], "linear"),
        ("lora_slots", [None, 8], "linear"),
    ],
)
def test_the_axis_of_a_sweep(tmp_path: Path, key: str, values: list[Any], scale: str) -> None:
    swept = make_sweep(tmp_path / "s.json", values, key)
    first: BenchResult = next(result for _, result in swept.results())
    picture = picture_of_sweep(swept, first, rows_of_sweep(swept, "smollm2-135m"))
    axes = picture.axes[0]
    assert axes.get_xscale() == scale
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(value) for value in values]
    plot_sweep(swept)
    assert is_png(tmp_path / "s.png")


def test_a_sweep_without_results_draws_nothing(tmp_path: Path) -> None:
    failed = SweepPoint(value=1, file="1.json", requests_per_second={}, ratios={}, failures=0, error="no memory")
    plot_sweep(SweepResult(key="rank", values=[1], points=[failed], path=tmp_path / "s.json"))
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_there_are_the_numbers_and_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    plot_result(make_result(SPEEDS, path=tmp_path / "r.json"))
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", "r.csv"}
    assert "pip install 'preft[train]'" in capsys.readouterr().err
