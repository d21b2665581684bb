"""The whole benchmark with fake workers: same work in every arm, ratios, failures, the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine_patch.store.file import read_adapter
from preft_cli.bench import run as running
from preft_cli.bench.adapters import check_distinct
from preft_cli.bench.plan import plan_bench
from preft_cli.bench.report import print_result
from preft_cli.bench.results import SCHEMA_VERSION, BenchResult, Repetition, Spread, WorkerResult
from preft_cli.bench.sizes import kv_cache_bytes
from preft_cli.bench.worker import WorkerSpec
from preft_cli.bench.workload import Workload
from preft_cli.config.schema import PreftConfig
from preft_cli.console import out
from preft_cli.errors import UserError
from preft_cli.models import BaseModel

SECONDS = {"base": [1.0, 1.25, 2.0], "lora": [4.0, 4.0, 5.0], "lorap": [2.0, 2.0, 2.5]}
CONFIG = PreftConfig.model_validate(
    {
        "model": {"base": "tiny"},
        "bench": {"num_requests": 5, "num_adapters": 3, "prompt_len": 4, "output_len": 2, "repeats": 3, "rank": 4},
    }
)


def read_store(path: Path) -> dict[str, torch.Tensor]:
    """A `.preft` file under PEFT's tensor names."""
    adapter = read_adapter(path)
    assert adapter.method == "lorap"
    pairs = {f"base_model.model.{name}": pair for name, pair in adapter.pairs.items()}
    made = {f"{name}.lora_A.weight": pair.a for name, pair in pairs.items()}
    return made | {f"{name}.lora_B.weight": pair.b for name, pair in pairs.items()}


class FakeWorkers:
    """Stands in for the processes: keeps what each was given, answers with `SECONDS`."""

    def __init__(self) -> None:
        self.specs: dict[str, WorkerSpec] = {}
        self.workloads: dict[str, Workload] = {}
        self.weights: dict[str, list[dict[str, torch.Tensor]]] = {}
        self.change: Callable[[WorkerResult], WorkerResult] = lambda result: result

    def __call__(
        self, spec: WorkerSpec, environment: dict[str, str | None], folder: Path, log: Path, **_: Any
    ) -> WorkerResult:
        self.specs[spec.arm] = spec
        workload = self.workloads[spec.arm] = Workload.model_validate_json(spec.requests.read_text())
        read = read_store if spec.arm == "lorap" else lambda path: load_file(path / "adapter_model.safetensors")
        self.weights[spec.arm] = [read(path) for path in spec.adapters]
        log.write_text("log\n")
        repetitions = [
            Repetition(
                seconds=seconds,
                requests=len(requests),
                tokens_asked=sum(request.output_len for request in requests),
                tokens_produced=sum(request.output_len for request in requests),
                failures=0,
            )
            for seconds, requests in zip(SECONDS[spec.arm], workload.repetitions, strict=True)
        ]
        return self.change(
            WorkerResult(
                arm=spec.arm,
                requests_digest=workload.digest(),
                start_seconds=9.0,
                engine={"dtype": "torch.float32", "max_num_seqs": spec.engine_args["max_num_seqs"]},
                patch=[],
                repetitions=repetitions,
                failed=[],
            )
        )


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWorkers:
    folder = tmp_path / "tiny"
    folder.mkdir()
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape, **heads}))
    fake = FakeWorkers()
    monkeypatch.setattr(running, "run_worker", fake)
    monkeypatch.setattr(running, "resolve", lambda name, root: BaseModel(name, folder, random=True))
    return fake


def test_every_arm_gets_the_same_work(workers: FakeWorkers, tmp_path: Path) -> None:
    result = running.bench(CONFIG, tmp_path)
    assert list(workers.specs) == ["base", "lora", "lorap"]
    assert workers.workloads["base"] == workers.workloads["lora"] == workers.workloads["lorap"]
    assert len({arm.requests_digest for arm in result.arms.values()}) == 1
    assert {spec.engine_args["seed"] for spec in workers.specs.values()} == {0}
    assert [spec.plugin for spec in workers.specs.values()] == [False, False, True]


def test_adapters_are_distinct_and_equal_among_arms(workers: FakeWorkers, tmp_path: Path) -> None:
    result = running.bench(CONFIG, tmp_path)
    lora, lorap = workers.weights["lora"], workers.weights["lorap"]
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
    assert workers.specs["base"].adapters == []


def test_nothing_stays_but_the_result_and_the_logs(workers: FakeWorkers, tmp_path: Path) -> None:
    running.bench(CONFIG, tmp_path, tmp_path / "o" / "r.json")
    assert sorted(file.name for file in (tmp_path / "o").iterdir()) == [
        "r.base.log",
        "r.json",
        "r.lora.log",
        "r.lorap.log",
    ]
    assert not any(path.exists() for spec in workers.specs.values() for path in [*spec.adapters, spec.requests])


def test_ratios(workers: FakeWorkers, tmp_path: Path) -> None:
    result = running.bench(CONFIG, tmp_path)
    assert list(result.ratios) == ["lora/base", "lora/lorap", "lorap/base", "lorap/lora"]
    # req/s: base 5, 4, 2.5; lora 1.25, 1.25, 1; lorap 2.5, 2.5, 2
    assert result.arms["base"].requests_per_second == Spread(median=4, low=2.5, high=5)
    assert result.ratios["lorap/base"] == Spread(median=0.625, low=0.4, high=1.0)
    assert result.ratios["lorap/lora"] == Spread(median=2.0, low=1.6, high=2.5)


def test_the_file_says_what_the_result_says(workers: FakeWorkers, tmp_path: Path) -> None:
    result = running.bench(CONFIG, tmp_path)
    assert result.path is not None
    assert result.path.parent == tmp_path / "runs" / "bench"
    data = json.loads(result.path.read_text())
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["config"]["bench"]["num_requests"] == 5
    assert {"python", "preft", "torch"} <= data["versions"].keys()
    assert data["hardware"]["cores"] > 0
    assert "path" not in data
    assert BenchResult.model_validate(data).model_copy(update={"path": result.path}) == result


def test_a_failed_request_is_counted_and_shown(
    workers: FakeWorkers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plant(result: WorkerResult) -> WorkerResult:
        if result.arm != "lora":
            return result
        bad = result.repetitions[1].model_copy(update={"failures": 2, "tokens_produced": 7})
        repetitions = [result.repetitions[0], bad, result.repetitions[2]]
        return result.model_copy(update={"repetitions": repetitions, "failed": ["rep1-0: 1 of 2 tokens"]})

    workers.change = plant
    result = running.bench(CONFIG, tmp_path)
    assert (result.failures, result.arms["lora"].failures, result.arms["base"].failures) == (2, 2, 0)
    assert result.arms["lora"].requests_per_second.low == 0.75  # 3 good answers in 4 seconds
    print_result(result)
    assert "2 requests failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"requests_digest": "other"}, "same requests"),
        ({"engine": {"dtype": "torch.float32", "max_num_seqs": 99}}, "max_num_seqs"),
        ({"engine": {"dtype": "torch.bfloat16", "max_num_seqs": 32}}, "dtype"),
    ],
)
def test_arms_that_do_not_compare_are_refused(
    workers: FakeWorkers, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    workers.change = lambda result: result.model_copy(update=change) if result.arm == "lorap" else result
    with pytest.raises(UserError, match=said):
        running.bench(CONFIG, tmp_path, tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


def test_a_shared_file_or_shared_weights_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / "a.preft", tmp_path / "b.preft"]
    files[0].touch()
    files[1].symlink_to(files[0])
    with pytest.raises(UserError, match="adapters 0 and 1 share their file"):
        check_distinct(files, ["x", "y"])
    with pytest.raises(UserError, match="share their weights"):
        check_distinct([tmp_path / "c", tmp_path / "d"], ["x", "x"])


def test_too_long_requests_and_bad_outputs_are_refused_before_any_work(workers: FakeWorkers, tmp_path: Path) -> None:
    long = CONFIG.model_copy(update={"bench": CONFIG.bench.model_copy(update={"prompt_len": 63})})
    with pytest.raises(UserError, match="allows 64"):
        running.bench(long, tmp_path)
    with pytest.raises(UserError, match="is a folder"):
        running.bench(CONFIG, tmp_path, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        running.bench(CONFIG, tmp_path, tmp_path / "file" / "r.json")
    assert workers.specs == {}


def test_the_kv_cache_holds_all_requests(workers: FakeWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    base = BaseModel("tiny", tmp_path / "tiny", random=True)
    plan = plan_bench(CONFIG, tmp_path).model_copy(update={"prompt_len": 1000, "num_requests": 10**4})
    size = kv_cache_bytes(plan, 1000, base)
    assert size is not None
    assert size >= 1000 * 1002 * (2 * 2 * 1 * 8 * 4)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert kv_cache_bytes(plan, 1000, base) is None


def test_the_table_fits_a_plain_terminal(workers: FakeWorkers, tmp_path: Path) -> None:
    result = running.bench(CONFIG, tmp_path)
    with out.capture() as captured:
        print_result(result)
    text = captured.get()
    assert "0.62 (0.40-1.00)" in text
    assert "2.00 (1.60-2.50)" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "lorap" in text
