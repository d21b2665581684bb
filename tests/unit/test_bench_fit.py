"""Sizes and turns, worked out from a model's shape and a machine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preft_cli.bench import fit as fitting
from preft_cli.bench import plan as planning
from preft_cli.bench.fit import FittedPlan, fit
from preft_cli.bench.plan import plan_bench
from preft_cli.bench.presets import overrides
from preft_cli.bench.schedule import make_blocks
from preft_cli.bench.workload import make_workload
from preft_cli.config.load import load_defaults
from preft_cli.models import resolve

H200 = 149 * 10**9
H100 = 80 * 10**9


def fitted(preset: str, free: int, monkeypatch: pytest.MonkeyPatch, *sets: str) -> FittedPlan:
    monkeypatch.setattr(planning, "find_device", lambda: "gpu")
    monkeypatch.setattr(fitting, "free_gpu_memory", lambda count: free)
    config = load_defaults(Path(), [*overrides(preset), *sets]).config
    plan = plan_bench(config, Path())
    base = resolve(config.model.base)
    return fit(plan, base, make_workload(plan, 128_000))


def engines(found: FittedPlan) -> list[list[str]]:
    return [block.engines for block in found.blocks]


def args(found: FittedPlan, name: str) -> dict[str, Any]:
    return next(arm.engine_args for arm in found.plan.arms if arm.name == name)


LORA = ["lora-specialised-graphs", "lora-shared-graphs"]


def test_a_small_model_fits_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted("paper-0.5b", H200, monkeypatch)
    assert engines(found) == [["base", *LORA, "lorap", "direftp"]]
    assert {args(found, name)["max_loras"] for name in LORA} == {512}
    assert args(found, "lorap")["max_loras"] == 64
    # 512 requests of 512 tokens; K and V of 24 layers of 2 heads of 64 in bfloat16; a tenth to spare.
    held = 512 * 512 * 2 * 24 * 2 * 64 * 2
    assert held < args(found, "base")["kv_cache_memory_bytes"] < 1.2 * held
    assert len({arm.engine_args["kv_cache_memory_bytes"] for arm in found.plan.arms}) == 1


def test_a_larger_one_takes_turns_with_some(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted("paper-8b", H200, monkeypatch)
    assert engines(found) == [["base", LORA[0]], ["base", LORA[1]], ["base", "lorap"], ["base", "direftp"]]
    assert args(found, LORA[0])["max_loras"] == 512
    fewer = fitted("paper-8b", H200, monkeypatch, "bench.max_num_seqs=128", "bench.lora_graphs=specialised")
    assert engines(fewer) == [["base", LORA[0], "lorap"], ["base", "direftp"]]
    assert args(fewer, LORA[0])["max_loras"] == 512
    assert 15e9 < found.footprints["base"].weights < 17e9


def test_slots_of_multi_lora_are_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted("paper-8b", 35 * 10**9, monkeypatch)
    assert 0 < args(found, LORA[0])["max_loras"] < 150
    assert any("slots for 512 adapters" in note for note in found.notes)
    given = fitted("paper-8b", H100, monkeypatch, "bench.lora_slots=64")
    assert args(given, LORA[0])["max_loras"] == 64


def test_what_cannot_share_memory_is_alone_and_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted("paper-70b", H200, monkeypatch)
    order = ["base", *LORA, "lorap", "direftp"]
    assert engines(found) == [[name] for name in order * 3]
    assert [block.repetitions for block in found.blocks] == [[number] for number in range(3) for _ in order]
    assert [block.again for block in found.blocks] == [True] * 5 + [False] * 10


def test_a_small_memory_gives_a_smaller_kv_cache_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted("paper-8b", 28 * 10**9, monkeypatch)
    assert len({arm.engine_args["kv_cache_memory_bytes"] for arm in found.plan.arms}) == 1
    assert any("memory has no room for all of 512 requests" in note for note in found.notes)


def test_no_more_engines_than_asked_for() -> None:
    needs = dict.fromkeys(["base", "a", "b", "c"], 1)
    assert [block.engines for block in make_blocks(needs, 100, 2, 1)] == [["base", "a"], ["base", "b"], ["base", "c"]]
    assert [block.engines for block in make_blocks(needs, 100, None, 1)] == [["base", "a", "b", "c"]]
    assert [block.engines for block in make_blocks({"base": 1}, 0, None, 2)] == [["base"]]
