"""The whole benchmark with fake engines: same work in every arm, turns, ratios, failures, going on, the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from engine_patch.store.file import read_adapter
from preft_cli.bench import adapters as adapters_module
from preft_cli.bench import fit as fitting
from preft_cli.bench import prepare as preparing
from preft_cli.bench import run as running
from preft_cli.bench.adapters import check_distinct
from preft_cli.bench.comparable import SHARED_SETTINGS
from preft_cli.bench.engine import EngineSpec
from preft_cli.bench.report import print_result
from preft_cli.bench.results import SCHEMA_VERSION, BenchResult, Counters, Repetition, Started
from preft_cli.bench.worker import Event
from preft_cli.bench.workload import Workload
from preft_cli.config.schema import PreftConfig
from preft_cli.console import out
from preft_cli.errors import UserError
from preft_cli.models import BaseModel

SECONDS = {
    "base": [1.0, 1.25, 2.0],
    "lora": [4.0, 4.0, 5.0],
    "lora-specialised-graphs": [4.0, 4.0, 5.0],
    "lora-shared-graphs": [3.0, 3.5, 4.5],
    "lorap": [2.0, 2.0, 2.5],
    "direftp": [2.0, 2.0, 2.0],
    "direft": [2.0, 2.0, 2.0],
}
COUNTERS = Counters(preemptions=0, prompt_tokens=20, prefix_cache_queries=0, prefix_cache_hits=0, adapter_loads=None)


def config(**bench: Any) -> PreftConfig:
    sizes = {"num_requests": 5, "num_adapters": 3, "prompt_len": 4, "output_len": 2, "repeats": 3, "rank": 4}
    return PreftConfig.model_validate({"model": {"base": "tiny"}, "bench": {**sizes, **bench}})


def read_store(path: Path) -> dict[str, torch.Tensor]:
    """A `.preft` file under PEFT's tensor names."""
    adapter = read_adapter(path)
    pairs = {f"base_model.model.{name}": pair for name, pair in adapter.pairs.items()}
    made = {f"{name}.lora_A.weight": pair.a for name, pair in pairs.items()}
    return made | {f"{name}.lora_B.weight": pair.b for name, pair in pairs.items()}


class FakeEngines:
    """Stands in for the processes: keeps what each was given, answers with `SECONDS`, writes down what happens."""

    def __init__(self) -> None:
        self.specs: dict[str, EngineSpec] = {}
        self.workloads: dict[str, Workload] = {}
        self.weights: dict[str, list[dict[str, torch.Tensor]]] = {}
        self.happened: list[str] = []
        self.change: Callable[[str, Event], Event] = lambda name, event: event
        self.watched = False

    def __call__(
        self, name: str, spec: EngineSpec, environment: dict[str, str | None], requests: Path, log: Path
    ) -> FakeEngine:
        self.specs[name] = spec
        self.workloads[name] = Workload.model_validate_json(requests.read_text())
        peft = lambda path: load_file(path / "adapter_model.safetensors")  # noqa: E731
        self.weights[name] = [(read_store if path.suffix else peft)(path) for path in spec.adapters]
        self.happened.append(f"start {name}")
        log.write_text("log\n")
        return FakeEngine(name, self, log)


class FakeEngine:
    def __init__(self, name: str, engines: FakeEngines, log: Path) -> None:
        self.name, self.engines, self.log = name, engines, log

    def wait(self, phase: Literal["started", "warm"]) -> Event:
        spec, workload = self.engines.specs[self.name], self.engines.workloads[self.name]
        if phase == "warm":
            return self.engines.change(self.name, self.event(-1, 1.0, "warm"))
        args = spec.engine_args
        engine = {**dict.fromkeys(SHARED_SETTINGS, "alike"), "max_num_seqs": args["max_num_seqs"]}
        started = Started(requests_digest=workload.digest(), start_seconds=9.0, engine=engine, patch=[])
        return self.engines.change(self.name, Event(phase="started", started=started))

    def measure(self, number: int, watch: Callable[[], None]) -> Event:
        watch()
        self.engines.happened.append(f"{self.name} {number}")
        return self.engines.change(self.name, self.event(number, SECONDS[self.name][number], "measured"))

    def require_alive(self) -> None:
        self.engines.happened.append(f"{self.name} is asked whether it is alive") if self.engines.watched else None

    def event(self, number: int, seconds: float, phase: Literal["warm", "measured"]) -> Event:
        workload = self.engines.workloads[self.name]
        requests = workload.warmup if number < 0 else workload.repetitions[number]
        tokens = sum(request.output_len for request in requests)
        done = Repetition(
            number=number,
            seconds=seconds,
            requests=len(requests),
            tokens_asked=tokens,
            tokens_produced=tokens,
            failures=0,
            counters=COUNTERS,
        )
        return Event(phase=phase, repetition=done)

    def stop(self, *, idle: bool = True) -> None:
        self.engines.happened.append(f"stop {self.name}" + ("" if idle else " at once"))


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    folder = tmp_path / "tiny"
    folder.mkdir()
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape, **heads}))
    fake = FakeEngines()
    monkeypatch.setattr(running, "EngineProcess", fake)
    monkeypatch.setattr(preparing, "resolve", lambda name, root: BaseModel(name, folder, random=True))
    return fake


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"requests_digest": "other"}, "same requests"),
        *(({key: other}, key) for key in SHARED_SETTINGS for other in ("other", None)),
    ],
)
def test_arms_that_do_not_compare_are_refused(
    engines: FakeEngines, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    def other(name: str, event: Event) -> Event:
        started = event.started
        if name != "lorap" or started is None:
            return event
        if "requests_digest" in change:
            return event.model_copy(update={"started": started.model_copy(update=change)})
        engine = {key: value for key, value in (started.engine | change).items() if value is not None}
        return event.model_copy(update={"started": started.model_copy(update={"engine": engine})})

    engines.change = other
    with pytest.raises(UserError, match=said):
        running.bench(config(), tmp_path, tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()
    assert not any(text.endswith(" 0") for text in engines.happened)  # found out before anything was measured


def test_arms_of_a_kind_with_other_weights_are_refused(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preft_cli.bench import adapters

    honest = adapters.random_adapter

    def others_for_lorap(base: Any, modules: Any, method: str, rank: int, seed: int, dtype: str) -> Any:
        return honest(base, modules, method, rank, seed + (method == "lorap"), dtype)

    monkeypatch.setattr(adapters, "random_adapter", others_for_lorap)
    with pytest.raises(UserError, match="arms lora and lorap have other adapters"):
        running.bench(config(), tmp_path)
    assert engines.happened == []


def test_an_interrupted_run_goes_on(engines: FakeEngines, tmp_path: Path) -> None:
    asked = config(engines=2, repeats=1)
    result = tmp_path / "r.json"

    def crash(name: str, event: Event) -> Event:
        if name == "lorap":
            raise UserError("the engine failed")
        return event

    engines.change = crash
    with pytest.raises(UserError, match="the engine failed"):
        running.bench(asked, tmp_path, result)
    assert engines.happened[-1] == "stop lorap at once"
    assert (tmp_path / "r.parts").is_dir()
    engines.change, engines.happened = lambda name, event: event, []
    running.bench(asked, tmp_path, result, resume=True)
    assert engines.happened[:2] == ["start base", "start lorap"]
    assert "lora 0" not in engines.happened
    assert result.exists()
    assert not (tmp_path / "r.parts").exists()


def test_an_interrupted_turn_is_done_again_and_no_other(engines: FakeEngines, tmp_path: Path) -> None:
    def crash(name: str, event: Event) -> Event:
        if name == "lora" and event.repetition and event.repetition.number == 1:
            raise UserError("the engine failed")
        return event

    engines.change = crash
    with pytest.raises(UserError):
        running.bench(config(), tmp_path, tmp_path / "r.json")
    engines.change, engines.happened = lambda name, event: event, []
    result = running.bench(config(), tmp_path, tmp_path / "r.json", resume=True)
    turns = [f"{name} {number}" for number in (1, 2, 0) for name in ("base", "lora", "lorap")]
    assert engines.happened[3:-3] == turns
    assert [one.number for one in result.arms["lorap"].repetitions] == [0, 1, 2]
    assert len(result.arms["lorap"].started) == 2
    assert result.order == ["base", "lora", "lorap"] * 4


def test_a_run_goes_on_with_the_sizes_that_it_began_with(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(name: str, event: Event) -> Event:
        if name == "base" and event.repetition and event.repetition.number == 1:
            raise UserError("the engine failed")
        return event

    engines.change = crash
    with pytest.raises(UserError):
        running.bench(config(), tmp_path, tmp_path / "r.json")
    engines.change = lambda name, event: event
    monkeypatch.setattr(running, "fit", lambda *_: pytest.fail("sized anew"))
    running.bench(config(), tmp_path, tmp_path / "r.json", resume=True)


@pytest.mark.parametrize("other", [{"output_len": 3}, {"gpu_slots": 2}, {"lora_slots": 1}, {"dtype": "bfloat16"}])
def test_going_on_with_other_settings_is_refused(engines: FakeEngines, tmp_path: Path, other: dict[str, Any]) -> None:
    def crash(name: str, event: Event) -> Event:
        if name == "lorap":
            raise UserError("the engine failed")
        return event

    engines.change = crash
    with pytest.raises(UserError):
        running.bench(config(engines=2, repeats=1), tmp_path, tmp_path / "r.json")
    with pytest.raises(UserError, match="other settings") as refused:
        running.bench(config(engines=2, repeats=1, **other), tmp_path, tmp_path / "r.json", resume=True)
    assert refused.value.exit_code == 2


def test_a_shared_file_or_shared_weights_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / "a.preft", tmp_path / "b.preft"]
    files[0].touch()
    files[1].symlink_to(files[0])
    with pytest.raises(UserError, match="adapters 0 and 1 share their file"):
        check_distinct(files, ["x", "y"])
    with pytest.raises(UserError, match="share their weights"):
        check_distinct([tmp_path / "c", tmp_path / "d"], ["x", "x"])


def test_a_run_with_adapters_that_are_the_same_stops_before_any_engine(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preft_cli.bench import adapters

    honest = adapters.random_adapter
    monkeypatch.setattr(adapters, "random_adapter", lambda *args: honest(*args[:4], 7, *args[5:]))
    with pytest.raises(UserError, match="adapters 0 and 1 share their weights"):
        running.bench(config(), tmp_path)
    assert engines.happened == []


def test_too_small_a_disk_is_found_out_first(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(UserError, match="TMPDIR"):
        running.bench(config(), tmp_path)


def test_too_long_requests_and_bad_outputs_are_refused_before_any_work(engines: FakeEngines, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="allows 64"):
        running.bench(config(prompt_len=63), tmp_path)
    with pytest.raises(UserError, match="is a folder"):
        running.bench(config(), tmp_path, tmp_path)
    with pytest.raises(UserError, match=r"give the name of a \.json file"):
        running.bench(config(), tmp_path, tmp_path / "r.png")
    with pytest.raises(UserError, match="--resume needs --out"):
        running.bench(config(), tmp_path, resume=True)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        running.bench(config(), tmp_path, tmp_path / "file" / "r.json")
    assert engines.happened == []


def test_the_table_fits_a_plain_terminal(engines: FakeEngines, tmp_path: Path) -> None:
    result = running.bench(config(), tmp_path)
    with out.capture() as captured:
        print_result(result)
    text = captured.get()
    assert "0.62 (0.50-0.80)" in text
    assert "2.00 (2.00-2.00)" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "lorap" in text


def test_an_arm_that_does_not_fit_is_named(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "free_memory", lambda: 1 << 30)
    with pytest.raises(UserError, match=r"bench arm base takes at least 1.1 GB, and 0.9 GB are free"):
        running.bench(config(), tmp_path)


def test_adapters_that_host_memory_cannot_hold_are_refused_before_any_engine(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "free_memory", lambda: 64 << 30)
    monkeypatch.setattr("preft_cli.bench.machine.free_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"base, lora, lorap keep 0\.0 GB of adapters in host memory"):
        running.bench(config(), tmp_path)
    assert engines.happened == []


def test_engines_start_side_by_side_on_many_cores(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm(name: str, event: Event) -> Event:
        if event.repetition and event.repetition.number == -1:
            engines.happened.append(f"warm {name}")
        return event

    engines.change = warm
    monkeypatch.setattr("preft_cli.bench.machine.usable_cores", lambda: 2)
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


def test_a_finished_run_is_not_measured_again(engines: FakeEngines, tmp_path: Path) -> None:
    first = running.bench(config(), tmp_path, tmp_path / "r.json")
    engines.happened.clear()
    assert running.bench(config(), tmp_path, tmp_path / "r.json", resume=True) == first
    assert engines.happened == []
    running.bench(config(output_len=3), tmp_path, tmp_path / "r.json", resume=True)
    assert engines.happened != []


def test_files_that_are_not_ours_stay(engines: FakeEngines, tmp_path: Path) -> None:
    (tmp_path / "r.parts").mkdir()
    (tmp_path / "r.parts" / "precious").touch()
    running.bench(config(), tmp_path, tmp_path / "r.json")
    assert [path.name for path in (tmp_path / "r.parts").iterdir()] == ["precious"]
