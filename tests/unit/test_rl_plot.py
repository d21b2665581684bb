"""Pictures of RL runs: what is drawn is what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preft_cli.rl.curve import LearningCurve, curve_of
from preft_cli.rl.plot import draw_accuracies, draw_rewards, picture_of_run, plot_run, running_mean
from preft_cli.training.metrics import Metrics
from tests.unit.rl_runs import held_out, stats, write_run


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    write_run(metrics, steps=40)
    return metrics.rows()


def panel(picture: Any, title: str) -> tuple[Any, Any]:
    """The panel of that title, and its second axis if it has one."""
    [left] = [axes for axes in picture.axes if axes.get_title(loc="left") == title]
    right = [axes for axes in picture.axes if axes is not left and axes.bbox.bounds == left.bbox.bounds]
    return left, right[0] if right else None


def line(axes: Any, label: str) -> dict[float, float]:
    [found] = [one for one in axes.get_lines() if one.get_label() == label and len(one.get_xdata())]
    return dict(zip(map(float, found.get_xdata()), map(float, found.get_ydata()), strict=True))


def recorded(rows: list[dict[str, Any]], key: str) -> dict[float, float]:
    return {row["step"]: row[key] for row in rows if row["kind"] == "train"}


def test_every_series_of_a_run(rows: list[dict[str, Any]]) -> None:
    picture = picture_of_run(rows, "gcd", held_out(100), "the task")
    for title, label, key, second in (
        ("Reward and held-out accuracy", "reward, std", "reward_mean", False),
        ("Groups without signal", "groups whose answers tie", "tied_share", False),
        ("Groups without signal", "answers that solve", "solved_share", False),
        ("Entropy and KL", "entropy", "entropy", False),
        ("Entropy and KL", "KL from the base model", "kl", True),
        ("Length of answers", "mean length", "length_mean", False),
        ("Length of answers", "answers cut", "cut_share", True),
        ("Importance ratio and clipping", "importance ratio", "ratio_mean", False),
        ("Importance ratio and clipping", "clipped", "clip_ratio", True),
        ("Log-probabilities: |trainer - engine|", "mean", "logprob_gap_mean", False),
        ("Log-probabilities: |trainer - engine|", "largest", "logprob_gap_max", False),
    ):
        left, right = panel(picture, title)
        assert line(right if second else left, label) == recorded(rows, key), label
        assert left.get_ylabel()
        assert left.get_xlabel() == "step"
    syncs, speed = panel(picture, "Weight sync and speed of sampling")
    assert line(speed, "sampling") == recorded(rows, "tokens_per_s")
    milliseconds = {step: 1000 * seconds for step, seconds in recorded(rows, "seconds_sync").items()}
    assert line(syncs, "sync, 9.8 MB") == pytest.approx(milliseconds)


def test_accuracies_have_their_intervals(rows: list[dict[str, Any]]) -> None:
    axes, _ = panel(picture_of_run(rows, "gcd", held_out(100, constant=30)), "Reward and held-out accuracy")
    [bars] = [one for one in axes.containers if one.get_label() == "accuracy, 95% interval"]
    points, _, (segments,) = bars
    measured = {row["step"]: row["accuracy"] for row in rows if row["kind"] == "eval"}
    assert dict(zip(points.get_xdata(), points.get_ydata(), strict=True)) == measured
    assert set(measured) == {0, 20, 40}
    assert segments.get_segments()[0].tolist() == [
        [0, pytest.approx(0.1593, abs=1e-4)],
        [0, pytest.approx(0.2716, abs=1e-4)],
    ]
    assert line(axes, "always '3'") == {0.0: 0.15, 1.0: 0.15}


def test_the_band_of_rewards_ends_at_the_rewards(rows: list[dict[str, Any]]) -> None:
    axes, _ = panel(picture_of_run(rows, "gcd"), "Reward and held-out accuracy")
    [band] = [one for one in axes.collections if type(one).__name__ in ("PolyCollection", "FillBetweenPolyCollection")]
    heights = band.get_paths()[0].vertices[:, 1]
    assert (min(heights), max(heights)) == (0, pytest.approx(1, abs=0.1))


def test_the_time_of_a_step_adds_up(rows: list[dict[str, Any]]) -> None:
    axes, _ = panel(picture_of_run(rows, "gcd"), "Time of a step")
    assert axes.get_legend_handles_labels()[1] == ["generation", "training", "rewards", "sync", "rest"]
    top = axes.collections[-1].get_paths()[0].vertices[:, 1]
    assert max(top) == pytest.approx(2.6), "seconds_total"
    first = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert max(first) == pytest.approx(max(recorded(rows, "seconds_generation").values()))


def test_runs_of_which_less_is_known(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    empty = picture_of_run(metrics.rows(), "nothing yet")
    assert len(empty.axes) == 11, "eight panels, three of them with a second axis"
    unknown = dict.fromkeys(("kl", "clip_ratio", "entropy", "ratio_mean", "logprob_gap_mean", "logprob_gap_max"))
    metrics.train(**stats(1, **unknown, sync_bytes=0).row())
    metrics.train(**stats(2, entropy=float("nan"), logprob_gap_max=0.0).row())
    plot_run(metrics.rows(), tmp_path / "some.png", "two steps")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


def test_runs_beside_each_other() -> None:
    from matplotlib.figure import Figure

    def curve(low: float, steps: int = 3) -> LearningCurve:
        return LearningCurve(
            rewards={step: low + step / 10 for step in range(1, steps + 1)}, accuracies={0: 0.2, steps: low}
        )

    runs = {"lorap": [curve(0.1), curve(0.5)], "lora": [curve(0.2), curve(0.2, steps=2)], "direftp": []}
    left, right = Figure().subplots(1, 2)
    draw_rewards(left, runs)
    draw_accuracies(right, runs)
    assert line(left, "lorap") == pytest.approx({1: 0.4, 2: 0.5, 3: 0.6})
    assert list(line(left, "lora")) == [1, 2], "where all seeds have a value"
    assert line(right, "lorap") == pytest.approx({0: 0.2, 3: 0.3})
    band = left.collections[0].get_paths()[0].vertices[:, 1]
    assert (min(band), max(band)) == (pytest.approx(0.2), pytest.approx(0.8)), "the range of the seeds"
    assert left.get_lines()[0].get_color() != left.get_lines()[1].get_color()


def test_smoothing_and_curves(rows: list[dict[str, Any]]) -> None:
    assert running_mean({1: 1.0, 2: 3.0, 5: 5.0, 6: 7.0}, 2) == {1: 1, 2: 2, 5: 4, 6: 6}
    curve = curve_of([*rows, {"kind": "train", "step": 41, "loss": 1.0}])
    assert (len(curve.rewards), list(curve.accuracies), curve.accuracies[0]) == (40, [0, 20, 40], 0.21)
