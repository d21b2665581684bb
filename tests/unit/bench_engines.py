"""Stands in for the processes of engines, so that a whole benchmark takes no time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from engine_patch.store.file import read_adapter
from preft_cli.bench import prepare as preparing
from preft_cli.bench import run as running
from preft_cli.bench.comparable import SHARED_SETTINGS
from preft_cli.bench.engine import EngineSpec
from preft_cli.bench.results import Counters, Repetition, Started
from preft_cli.bench.worker import Event
from preft_cli.bench.workload import Workload
from preft_cli.config.schema import PreftConfig
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


def fake_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    """In place of the processes, for a tiny model."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape, **heads}))
    fake = FakeEngines()
    monkeypatch.setattr(running, "EngineProcess", fake)
    monkeypatch.setattr(preparing, "resolve", lambda name, root: BaseModel(name, folder, random=True))
    return fake
