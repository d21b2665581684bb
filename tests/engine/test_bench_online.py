"""Two arms behind their servers, on a tiny model without a tokenizer; both start side by side, the load is in turn."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from engine_patch.store.file import write_adapter
from preft_cli.adapters.peft_out import write_peft
from preft_cli.bench.engine import Answer, Answered, EngineSpec
from preft_cli.bench.online import OnlineEngine, server
from preft_cli.bench.workload import Request
from preft_cli.config.schema import LoadConfig
from preft_cli.models.modules import modules_of
from tests.reference import random_adapter
from tests.schedules.models import tiny_llama

pytestmark = pytest.mark.engine

ARGS = {
    "dtype": "float32", "seed": 0, "max_model_len": 128, "max_num_seqs": 4, "tensor_parallel_size": 1,
    "enable_prefix_caching": True, "skip_tokenizer_init": True, "enforce_eager": True, "block_size": 32,
    "kv_cache_memory_bytes": 1 << 28,
}  # fmt: skip
BESIDE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""For servers that start at once: each worker would be bound to the first core, and they would wait for each other."""
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
LOADS: dict[str, dict[str, Any]] = {
    "lora": {},  # a closed loop
    "lorap": {"request_rate": 30, "goodput": {"ttft": 60_000, "e2el": 60_000}},
}


class Seen(NamedTuple):
    """What one arm did."""

    settings: dict[str, Any]
    patch: list[dict[str, Any]]
    passes: list[Answered]
    """The same requests twice."""
    left: list[psutil.Process]
    """Processes of the server that outlived it."""


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    draw = random.Random(0)
    return [
        Request(id=f"r-{i}", prompt_token_ids=draw.choices(range(512), k=70), output_len=2 + i, adapter=i % 3)
        for i in range(12)
    ]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[EngineSpec]:
    root = tmp_path_factory.mktemp("online")
    model = tiny_llama(root / "tiny")
    paths: dict[str, list[Path]] = {"lora": [], "lorap": []}
    for index in range(3):
        adapter = random_adapter(modules_of(model), model.fingerprint, seed=index, method="lorap")
        paths["lorap"].append(root / f"adapter-{index}.preft")
        write_adapter(paths["lorap"][-1], adapter)
        paths["lora"].append(root / f"adapter-{index}")
        write_peft(paths["lora"][-1], replace(adapter, method="lora"))
    return [
        EngineSpec(
            arm=arm,
            mode="online",
            engine_args={"model": str(model.path), **ARGS, **LORA},
            adapters=adapters,
            plugin=arm == "lorap",
            load=LoadConfig.model_validate(LOADS[arm]),
            scratch=tmp_path_factory.mktemp(arm),
        )
        for arm, adapters in paths.items()
    ]


@pytest.fixture(scope="module")
def seen(specs: list[EngineSpec], requests: list[Request]) -> Iterator[dict[str, Seen]]:
    own, engines = threading.local(), dict[str, OnlineEngine]()

    def start(spec: EngineSpec) -> None:
        # A worker's environment says whether the plugin is on; here two servers start from one process.
        own.environment = BESIDE | ({} if spec.plugin else {"PREFT_DISABLE": "1"})
        engines[spec.arm] = OnlineEngine(spec)

    upstream = server.server_environment
    try:
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(specs)) as pool:
            patch.setattr(server, "server_environment", lambda: upstream() | own.environment)
            list(pool.map(start, specs))
        yield {spec.arm: observe(engines[spec.arm], requests) for spec in specs}
    finally:
        for engine in engines.values():
            engine.stop()


def observe(engine: OnlineEngine, requests: list[Request]) -> Seen:
    passes = [engine.answer(requests) for _ in range(2)]
    (running,) = [one for one in psutil.Process().children() if one.pid == engine._server._process.pid]
    assert os.getpgid(running.pid) == os.getpgid(0)
    family = [running, *running.children(recursive=True)]
    engine.stop()
    _, left = psutil.wait_procs(family, timeout=5)
    return Seen(engine.settings, engine.patch, passes, left)


def test_all_answers_have_the_length_that_was_asked_for(seen: dict[str, Seen], requests: list[Request]) -> None:
    for arm, one in seen.items():
        for answered in one.passes:
            assert answered.answers == [Answer(request.output_len, "length") for request in requests], arm


def test_latencies_are_there_and_in_order(seen: dict[str, Seen]) -> None:
    for one in seen.values():
        for answered in one.passes:
            assert answered.latency
            for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
                found = getattr(answered.latency, name)
                assert 0 < found.p50 <= found.p90 <= found.p99
            assert answered.latency.ttft_ms.p50 < answered.latency.e2el_ms.p50 <= answered.seconds * 1000
    goodput = {arm: one.passes[0].latency and one.passes[0].latency.goodput for arm, one in seen.items()}
    assert goodput["lora"] is None
    assert goodput["lorap"] == pytest.approx(12 / seen["lorap"].passes[0].seconds)


def test_each_pass_is_counted_and_finds_an_empty_prefix_cache(seen: dict[str, Seen], requests: list[Request]) -> None:
    tokens = sum(len(request.prompt_token_ids) for request in requests)
    for one in seen.values():
        for answered in one.passes:
            counted = answered.counters
            assert (counted.prompt_tokens, counted.prefix_cache_queries) == (tokens, tokens)
            assert (counted.prefix_cache_hits, counted.preemptions) == (0, 0)
    assert [answered.counters.adapter_loads for answered in seen["lora"].passes] == [None] * 2
    first, second = (answered.counters.adapter_loads for answered in seen["lorap"].passes)
    assert first is not None
    assert second is not None
    assert first["device"] >= 3
    assert (first["host"], second["host"]) == (3, 0)  # all of them stay in host memory


def test_only_the_arm_of_preft_s_is_patched(seen: dict[str, Seen]) -> None:
    live = {arm: [status["live"] for status in one.patch] for arm, one in seen.items()}
    assert live == {"lora": [], "lorap": [True, True]}  # engine core and worker


def test_the_arms_have_the_same_settings(seen: dict[str, Seen]) -> None:
    settings = seen["lora"].settings
    assert settings == seen["lorap"].settings
    assert {key: settings[key] for key in ARGS.keys() & settings.keys()} == {
        **{key: ARGS[key] for key in ARGS.keys() & settings.keys()},
        "dtype": "torch.float32",
    }
    assert settings["lora"]["max_loras"] == 2


def test_nothing_outlives_the_servers(seen: dict[str, Seen]) -> None:
    assert {arm: one.left for arm, one in seen.items()} == {"lora": [], "lorap": []}
