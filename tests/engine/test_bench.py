"""The preset `ci` for real, on a tiny model: every arm with an engine of its own, taking turns."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from preft_cli.bench.presets import overrides
from preft_cli.bench.result_schema import PATH
from preft_cli.bench.results import BenchResult
from preft_cli.bench.run import bench
from preft_cli.config.load import load_defaults
from tests.schedules.models import tiny_llama

pytestmark = pytest.mark.engine

ARMS = ["base", "lora", "lorap", "direftp", "direft"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    root = tmp_path_factory.mktemp("bench")
    tiny_llama(root / "tiny")
    # With the prefix cache on, so that a repetition which found a warm one would be seen.
    changes = ["model.base=tiny", "bench.max_num_seqs=4", "bench.enable_prefix_caching=true"]
    config = load_defaults(root, [*overrides("ci"), *changes]).config
    return bench(config, root, root / "ci.json", preset="ci")


def test_the_file_passes_its_schema_and_reads_back(result: BenchResult) -> None:
    assert result.path is not None
    written = json.loads(result.path.read_text())
    jsonschema.validate(written, json.loads(PATH.read_text()))
    assert BenchResult.model_validate(written).ratios == result.ratios


def test_all_arms_answer_all_requests(result: BenchResult) -> None:
    assert list(result.arms) == ARMS
    assert result.failures == 0
    for arm in result.arms.values():
        asked = [(one.requests, one.tokens_asked, one.tokens_produced) for one in (*arm.repetitions, *arm.again)]
        assert asked == [(8, 64, 64)] * 3


def test_they_took_turns(result: BenchResult) -> None:
    assert result.order == ARMS * 3
    assert set(result.same_seed) == set(ARMS)


def test_ratios_are_there_and_of_a_believable_size(result: BenchResult) -> None:
    assert set(result.ratios) == {f"{one}/{other}" for one in ARMS[1:] for other in ARMS if one != other}
    assert all(0.01 < ratio.low <= ratio.median <= ratio.high < 100 for ratio in result.ratios.values())


def test_only_the_arms_of_preft_are_patched(result: BenchResult) -> None:
    live = {name: [status["live"] for status in arm.started[0].patch] for name, arm in result.arms.items()}
    # engine core and worker
    assert live == {"base": [], "lora": [], **{name: [True, True] for name in ARMS[2:]}}
    loras = {name: arm.started[0].engine["lora"] is not None for name, arm in result.arms.items()}
    assert loras == {"base": False, **dict.fromkeys(ARMS[1:], True)}


def test_the_engines_count(result: BenchResult) -> None:
    for name, arm in result.arms.items():
        for one in (*arm.repetitions, *arm.again):
            assert one.counters.prompt_tokens == 8 * 32
            assert (one.counters.preemptions, one.counters.prefix_cache_queries) == (0, 8 * 32)
            assert (one.counters.adapter_loads is None) == (name in ("base", "lora"))
    # Four slots and room for four adapters: the warm-up brought all of them in.
    assert {
        one.counters.adapter_loads["device"] for one in result.arms["lorap"].repetitions if one.counters.adapter_loads
    } == {0}


def test_no_repetition_finds_a_warm_prefix_cache(result: BenchResult) -> None:
    assert {arm.started[0].engine["enable_prefix_caching"] for arm in result.arms.values()} == {True}
    assert result.prefix_caching is True
    hits = [one.counters.prefix_cache_hits for arm in result.arms.values() for one in (*arm.repetitions, *arm.again)]
    assert hits == [0] * 15


def test_the_stock_arms_say_that_the_plugin_is_off(result: BenchResult) -> None:
    assert result.path is not None
    logs = {name: Path(result.path.parent / arm.logs[0]).read_text() for name, arm in result.arms.items()}
    off = {name: "PREFT_DISABLE is set" in log for name, log in logs.items()}
    assert off == {"base": True, "lora": True, **dict.fromkeys(ARMS[2:], False)}
