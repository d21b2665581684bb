"""The whole benchmark with fake engines: same work in every arm, turns, ratios, failures, the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from preft_cli.bench import adapters as adapters_module
from preft_cli.bench import run as running
from preft_cli.bench.report import print_result
from preft_cli.bench.results import SCHEMA_VERSION, BenchResult
from preft_cli.bench.worker import Event
from preft_cli.console import out
from tests.unit.bench_engines import FakeEngines, config


def test_every_arm_gets_the_same_work(engines: FakeEngines, tmp_path: Path) -> None:
    result = running.bench(config(), tmp_path)
    assert list(engines.specs) == ["base", "lora", "lorap"]
    assert engines.workloads["base"] == engines.workloads["lora"] == engines.workloads["lorap"]
    assert len({one.requests_digest for arm in result.arms.values() for one in arm.started}) == 1
    assert {spec.engine_args["seed"] for spec in engines.specs.values()} == {0}
    assert {spec.engine_args["kv_cache_memory_bytes"] for spec in engines.specs.values()} == {64 * 2**20}
    assert [spec.plugin for spec in engines.specs.values()] == [False, False, True]


def test_engines_take_turns(engines: FakeEngines, tmp_path: Path) -> None:
    result = running.bench(config(repeats=2), tmp_path)
    assert engines.happened == [
        *("start base", "start lora", "start lorap"),
        *("base 0", "lora 0", "lorap 0", "base 1", "lora 1", "lorap 1"),
        *("base 0", "lora 0", "lorap 0"),  # the same once more
        *("stop base", "stop lora", "stop lorap"),
    ]
    assert result.order == [text.split()[0] for text in engines.happened[3:12]]
    assert result.same_seed == {"base": 1.0, "lora": 1.0, "lorap": 1.0}
    assert [len(arm.repetitions) for arm in result.arms.values()] == [2, 2, 2]
    assert [len(arm.again) for arm in result.arms.values()] == [1, 1, 1]


def test_one_engine_at_a_time_is_started_anew_each_time(engines: FakeEngines, tmp_path: Path) -> None:
    result = running.bench(config(engines=1, repeats=2, arms=["base", "lorap"]), tmp_path, tmp_path / "r.json")
    first = ["start base", "base 0", "base 0", "stop base", "start lorap", "lorap 0", "lorap 0", "stop lorap"]
    assert engines.happened == [
        *first,
        *("start base", "base 1", "stop base", "start lorap", "lorap 1", "stop lorap"),
    ]
    assert result.ratios["lorap/base"].model_dump() == {"median": 0.5625, "low": 0.5, "high": 0.625}
    assert result.arms["base"].logs == ["r.base.2.log", "r.base.log"]
    assert any("each engine alone" in note for note in result.notes)


def test_the_base_engine_stays_while_others_come_and_go(engines: FakeEngines, tmp_path: Path) -> None:
    result = running.bench(config(engines=2, repeats=1), tmp_path)
    assert engines.happened == [
        *("start base", "start lora", "base 0", "lora 0", "base 0", "lora 0", "stop lora"),
        *("start lorap", "base 0", "lorap 0", "base 0", "lorap 0", "stop base", "stop lorap"),
    ]
    assert [one.block for one in result.arms["base"].repetitions] == [0, 1]
    assert result.ratios["lorap/lora"].median == 2.0


def test_adapters_are_distinct_and_equal_among_arms(engines: FakeEngines, tmp_path: Path) -> None:
    result = running.bench(config(), tmp_path)
    lora, lorap = engines.weights["lora"], engines.weights["lorap"]
    assert len(lora) == len(lorap) == 3
    for one, other in zip(lora, lorap, strict=True):
        assert one.keys() == other.keys()
        assert len(one) == 2 * 2 * 7  # A and B of seven linear layers in two decoder layers
        assert all(one[name].equal(other[name]) for name in one)
    assert all(not first[name].equal(second[name]) for first, second in pairwise(lora) for name in first)
    described = [result.arms[arm].adapters for arm in ("lora", "lorap")]
    assert described[0] is not None
    assert described[1] is not None
    assert described[0].weights_digest == described[1].weights_digest
    assert [one.format for one in described if one] == ["peft", "preft"]


def test_mixed_ranks_take_turns(engines: FakeEngines, tmp_path: Path) -> None:
    running.bench(config(rank=[4, 16], arms=["base", "lora", "lorap"]), tmp_path)
    ranks = [{len(t) for name, t in one.items() if "lora_A" in name} for one in engines.weights["lora"]]
    assert ranks == [{4}, {16}, {4}]
    assert {spec.engine_args.get("max_lora_rank") for spec in engines.specs.values()} == {None, 16}


def test_many_are_made_by_several_processes(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = []
    honest = adapters_module.ProcessPoolExecutor
    monkeypatch.setattr(adapters_module, "ProcessPoolExecutor", lambda *a, **k: pools.append(a) or honest(*a, **k))
    running.bench(config(num_adapters=40, repeats=1), tmp_path)
    assert len(pools) == 1  # for both kinds
    lora, lorap = engines.weights["lora"], engines.weights["lorap"]
    assert len(lora) == len(lorap) == 40
    assert all(one[name].equal(other[name]) for one, other in zip(lora, lorap, strict=True) for name in one)
    assert [path.name for path in engines.specs["lora"].adapters] == [f"adapter-{index:05d}" for index in range(40)]


def test_interventions_are_made_for_both_of_their_arms(engines: FakeEngines, tmp_path: Path) -> None:
    result = running.bench(config(arms=["direftp", "direft"], repeats=1), tmp_path)
    sets = [result.arms[arm].adapters for arm in ("direftp", "direft")]
    assert sets[0] is not None
    assert sets[0] == sets[1]
    assert engines.specs["direft"].engine_args["max_loras"] == 3


def test_the_better_of_two_settings_counts(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both: dict[str | None, dict[str, Any]] = {
        "specialised graphs": {},
        "shared graphs": {"compilation_config": {"x": False}},
    }
    monkeypatch.setattr(
        "preft_cli.bench.arms.variants", lambda arm, device, bench: both if arm == "lora" else {None: {}}
    )
    result = running.bench(config(), tmp_path)
    assert list(result.arms) == ["base", "lora", "lorap"]
    assert result.arms["lora"].variant == "shared graphs"
    assert result.arms["lora"].tried.keys() == {"specialised graphs", "shared graphs"}
    assert result.ratios["lora/base"].median == pytest.approx(0.357, abs=0.001)
    assert engines.specs["lora-shared-graphs"].engine_args["compilation_config"] == {"x": False}


def test_ratios_are_of_repetitions_beside_each_other(engines: FakeEngines, tmp_path: Path) -> None:
    ratios = running.bench(config(), tmp_path).ratios
    assert set(ratios) == {"lora/base", "lorap/base", "lora/lorap", "lorap/lora"}
    assert ratios["lorap/base"].model_dump() == {"median": 0.625, "low": 0.5, "high": 0.8}
    assert ratios["lorap/lora"].model_dump() == {"median": 2.0, "low": 2.0, "high": 2.0}


def test_the_file_says_what_the_result_says(engines: FakeEngines, tmp_path: Path) -> None:
    result = running.bench(config(), tmp_path, preset="ci")
    assert result.path is not None
    assert result.path.parent == tmp_path / "runs" / "bench"
    data = json.loads(result.path.read_text())
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["config"]["bench"]["num_requests"] == 5
    assert {"python", "preft", "torch"} <= data["versions"].keys()
    assert data["hardware"]["cores"] > 0
    assert data["preset"] == "ci"
    assert data["prefix_caching"] is False
    assert "path" not in data
    assert BenchResult.model_validate(data).model_copy(update={"path": result.path}) == result
    assert list(result.path.parent.glob("*.parts")) == []


def failing(name: str, number: int) -> Callable[[str, Event], Event]:
    """Two requests of one repetition of one engine fail."""

    def plant(engine: str, event: Event) -> Event:
        done = event.repetition
        if engine != name or done is None or done.number != number:
            return event
        bad = done.model_copy(update={"failures": 2, "tokens_produced": 7})
        return event.model_copy(update={"repetition": bad, "failed": ["rep1-0: 1 of 2 tokens"]})

    return plant


def test_a_failed_request_is_counted_and_shown(
    engines: FakeEngines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.change = failing("lora", 1)
    result = running.bench(config(), tmp_path)
    assert (result.failures, result.arms["lora"].failures, result.arms["base"].failures) == (2, 2, 0)
    assert result.arms["lora"].requests_per_second.low == 0.75  # 3 good answers in 4 seconds
    print_result(result)
    said = capsys.readouterr().err
    assert "2 requests failed" in said
    assert "rep1-0: 1 of 2 tokens" in said


def test_a_failure_of_the_warm_up_counts_too(engines: FakeEngines, tmp_path: Path) -> None:
    engines.change = failing("lorap", -1)
    assert running.bench(config(), tmp_path).arms["lorap"].failures == 2


def test_a_second_time_that_is_faster_is_said(engines: FakeEngines, tmp_path: Path) -> None:
    asked = []

    def warm_cache(name: str, event: Event) -> Event:
        done = event.repetition
        if name == "lora" and done and done.number == 0:
            asked.append(done)
            if len(asked) == 2:
                return event.model_copy(update={"repetition": done.model_copy(update={"seconds": 2.0})})
        return event

    engines.change = warm_cache
    result = running.bench(config(), tmp_path)
    assert result.same_seed == {"base": 1.0, "lora": 2.0, "lorap": 1.0}
    (note,) = [note for note in result.notes if "once more" in note]
    assert note.startswith("lora: the same requests once more were 100% faster")


def test_the_table_fits_a_plain_terminal(engines: FakeEngines, tmp_path: Path) -> None:
    result = running.bench(config(), tmp_path)
    with out.capture() as captured:
        print_result(result)
    text = captured.get()
    assert "0.62 (0.50-0.80)" in text
    assert "2.00 (2.00-2.00)" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "lorap" in text


def test_engines_start_side_by_side_on_many_cores(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm(name: str, event: Event) -> Event:
        if event.repetition and event.repetition.number == -1:
            engines.happened.append(f"warm {name}")
        return event

    engines.change = warm
    monkeypatch.setattr("preft_cli.bench.run.cores", lambda: 2)
    running.bench(config(repeats=1), tmp_path)
    assert engines.happened[:6] == [
        *("start base", "start lora", "warm base"),
        *("start lorap", "warm lora", "warm lorap"),
    ]


def test_all_engines_are_watched_while_one_measures(engines: FakeEngines, tmp_path: Path) -> None:
    engines.watched = True
    running.bench(config(repeats=1), tmp_path)
    asked = [f"{name} is asked whether it is alive" for name in ("base", "lora", "lorap")]
    assert engines.happened[3:6] == asked
