"""Sweeps: values checked before anything runs, failures that do not end them, going on after an interruption."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from preft_cli.bench import prepare as preparing
from preft_cli.bench.results import BenchResult
from preft_cli.bench.sweep import parse_sweep, run_sweep, swept_keys
from preft_cli.bench.sweep_report import print_sweep
from preft_cli.config.problems import ConfigErrors
from preft_cli.config.schema import PreftConfig
from preft_cli.console import out
from preft_cli.errors import UserError
from tests.unit.bench_results import make_config, make_result

CONFIG = make_config(arms=["base", "lora", "lorap"], num_requests=16)


class FakeBench:
    """Stands in for `preft_cli.bench.run.bench`; the speed of lora is the number of adapters."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool, str | None]] = []
        self.fails: dict[int, BaseException] = {}
        self.failures = 0
        self.refused: int | None = None

    def prepare(self, config: PreftConfig, root: Path) -> None:
        if config.bench.num_adapters == self.refused:
            raise UserError("too long", 2)

    def __call__(
        self, config: PreftConfig, root: Path, out: Path | None, *, resume: bool, preset: str | None
    ) -> BenchResult:
        many = config.bench.num_adapters
        self.calls.append((many, resume, preset))
        if many in self.fails:
            raise self.fails[many]
        speeds = {"base": [10.0, 10, 10], "lora": [float(many)] * 3, "lorap": [8.0, 8, 8]}
        return make_result(speeds, path=out, config=config, failures=self.failures)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    fake = FakeBench()
    module = ModuleType("preft_cli.bench.run")
    vars(module)["bench"] = fake
    monkeypatch.setitem(sys.modules, "preft_cli.bench.run", module)
    monkeypatch.setattr(preparing, "prepare", fake.prepare)
    return fake


def test_each_value_is_a_checked_config() -> None:
    sweep = parse_sweep("bench.num_adapters = 1, 8,64", CONFIG)
    assert sweep.key == "num_adapters"
    assert list(sweep.configs) == [1, 8, 64]
    expected = CONFIG.bench.model_copy(update={"num_adapters": 64})
    assert sweep.configs[64].bench == expected
    assert sweep.configs[64].model == CONFIG.model
    assert list(parse_sweep("adapter_choice=zipf,uniform", CONFIG).configs) == ["zipf", "uniform"]
    assert list(parse_sweep("rank=8", CONFIG).configs) == [8]


def test_keys_that_move_together() -> None:
    swept = parse_sweep("prompt_len:bench.output_len=64:320, 320:64", CONFIG)
    assert swept.key == "prompt_len:output_len"
    lengths = {name: (one.bench.prompt_len, one.bench.output_len) for name, one in swept.configs.items()}
    assert lengths == {"64:320": (64, 320), "320:64": (320, 64)}


def test_keys_that_can_be_swept() -> None:
    asked = {"num_adapters", "rank", "gpu_slots", "output_len", "prompt_len", "max_num_seqs"}
    assert asked | {"mode", "dtype", "lora_slots"} <= set(swept_keys())
    assert not {"arms", "load", "prompts"} & set(swept_keys())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_adapters", "expected key=value,value, such as num_adapters=1,8,64"),
        ("=1,2", "expected key=value,value"),
        ("num_adapters=", "expected single values with commas between them"),
        ("num_adapters=1,[2", "expected single values"),
        ("rank=[8, 16],8", "expected single values"),
        ("num_adapters=8,8", "the value 8 is named twice"),
        ("nm_adapters=1,2", "bench.nm_adapters: unknown key (did you mean num_adapters?)"),
        ("train.rank=1,2", "bench.train.rank: unknown key"),
        ("arms=base", "bench.arms cannot be swept; these can: mode, num_adapters"),
        ("dtype=float31", "expected auto or float32 or bfloat16 or float16, found 'float31' (did you mean float32?)"),
        ("rank=8,true", "expected a number"),
        ("prompt_len:output_len=8,9", "expected single values with commas between them, such as 64:64,320:320"),
        ("rank:rank=8:8", "a key is named twice"),
        ("rank:arms=8:base", "bench.arms cannot be swept"),
    ],
)
def test_bad_sweeps(text: str, said: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        parse_sweep(text, CONFIG)
    [problem] = refused.value.problems
    assert problem.where == f"--sweep {text}"
    assert said in problem.text


def test_all_bad_values_are_told_at_once() -> None:
    with pytest.raises(ConfigErrors) as refused:
        parse_sweep("num_adapters=0,8,x", CONFIG)
    assert [problem.text for problem in refused.value.problems] == [
        "bench.num_adapters: must be more than 0, found 0",
        "bench.num_adapters: expected a whole number, found 'x'",
    ]


def test_results_and_their_summary(bench: FakeBench, tmp_path: Path) -> None:
    sweep = parse_sweep("num_adapters=1,8", CONFIG)
    swept = run_sweep(sweep, tmp_path, tmp_path / "o" / "s.json", preset="ci")
    assert bench.calls == [(1, False, "ci"), (8, False, "ci")]
    assert sorted(str(path.relative_to(tmp_path / "o")) for path in (tmp_path / "o").rglob("*.json")) == [
        "s.json",
        "s/num_adapters=1.json",
        "s/num_adapters=8.json",
    ]
    document = json.loads((tmp_path / "o" / "s.json").read_text())
    assert document == json.loads(swept.model_dump_json())
    assert (document["schema_version"], document["key"], document["values"]) == (1, "num_adapters", [1, 8])
    point = document["points"][1]
    assert (point["value"], point["file"], point["error"]) == (8, "s/num_adapters=8.json", None)
    assert point["requests_per_second"]["lora"]["median"] == 8
    assert point["ratios"]["lora/base"]["median"] == 0.8
    assert [result.config.bench.num_adapters for _, result in swept.results()] == [1, 8]


def test_a_value_that_fails_does_not_end_the_sweep(bench: FakeBench, tmp_path: Path) -> None:
    bench.fails = {8: UserError("no memory")}
    swept = run_sweep(parse_sweep("num_adapters=1,8,64", CONFIG), tmp_path, tmp_path / "s.json")
    assert [point.error for point in swept.points] == [None, "no memory", None]
    assert [point.value for point, _ in swept.results()] == [1, 64]
    assert swept.failures == 1


def test_a_value_that_cannot_work_is_told_before_any_is_measured(bench: FakeBench, tmp_path: Path) -> None:
    bench.refused = 64
    with pytest.raises(UserError, match="too long"):
        run_sweep(parse_sweep("num_adapters=1,64", CONFIG), tmp_path, tmp_path / "s.json")
    assert bench.calls == []


def test_an_interrupted_sweep_has_what_was_done_and_goes_on(bench: FakeBench, tmp_path: Path) -> None:
    bench.fails = {64: KeyboardInterrupt()}
    sweep = parse_sweep("num_adapters=1,8,64", CONFIG)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, tmp_path, tmp_path / "s.json")
    assert [point["value"] for point in json.loads((tmp_path / "s.json").read_text())["points"]] == [1, 8]
    bench.calls, bench.fails = [], {}
    swept = run_sweep(sweep, tmp_path, tmp_path / "s.json", resume=True)
    assert bench.calls == [(64, True, None)]
    assert [point.value for point in swept.points] == [1, 8, 64]
    with pytest.raises(UserError, match="needs --out"):
        run_sweep(sweep, tmp_path, resume=True)


def test_resume_measures_again_what_is_of_another_config_or_failed(bench: FakeBench, tmp_path: Path) -> None:
    bench.failures = 1
    run_sweep(parse_sweep("num_adapters=1", CONFIG), tmp_path, tmp_path / "s.json")
    bench.failures = 0
    run_sweep(parse_sweep("num_adapters=8", CONFIG), tmp_path, tmp_path / "s.json")
    (tmp_path / "s" / "num_adapters=64.json").write_text("{")
    bench.calls = []
    run_sweep(parse_sweep("num_adapters=1,8,64", CONFIG), tmp_path, tmp_path / "s.json", resume=True)
    assert [many for many, *_ in bench.calls] == [1, 64]
    bench.calls = []
    other = make_config(arms=["base", "lora", "lorap"], num_requests=99)
    run_sweep(parse_sweep("num_adapters=1,8", other), tmp_path, tmp_path / "s.json", resume=True)
    assert [many for many, *_ in bench.calls] == [1, 8]


def test_the_table_fits_a_plain_terminal(bench: FakeBench, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bench.fails = {8: UserError("no memory")}
    bench.failures = 2
    swept = run_sweep(parse_sweep("num_adapters=1,8,64", CONFIG), tmp_path, tmp_path / "s.json")
    speeds = dict.fromkeys(("base", "lora", "lorap", "direft", "direftp"), swept.points[0].requests_per_second["base"])
    ratios = {f"{arm}/base": swept.points[0].ratios["lora/base"] for arm in speeds}
    wide = swept.points[0].model_copy(update={"requests_per_second": speeds, "ratios": ratios})
    with out.capture() as captured:
        print_sweep(swept.model_copy(update={"points": [wide, *swept.points[1:]]}))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.strip().startswith(("1 ", "8 ", "64 ")) for line in lines) == 3
    said = capfd.readouterr().err
    assert "num_adapters=8: no memory" in said
    assert "num_adapters=64: 2 requests failed" in said


def test_a_sweep_needs_a_json_file(bench: FakeBench, tmp_path: Path) -> None:
    sweep: Any = parse_sweep("num_adapters=1", CONFIG)
    for bad in (tmp_path, tmp_path / "s.csv"):
        with pytest.raises(UserError, match=r"give the name of a \.json file"):
            run_sweep(sweep, tmp_path, bad)
    assert bench.calls == []
