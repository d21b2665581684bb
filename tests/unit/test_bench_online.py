"""The online engine without its engine: what the server is started with, what the load asks for, and what is read back."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.manifest import Manifest
from engine_patch.server import parse_arguments
from engine_patch.store.file import read_header, write_adapter
from preft_cli.bench.engine import Answer, EngineSpec
from preft_cli.bench.offline import engine_settings
from preft_cli.bench.online import server as server_module
from preft_cli.bench.online.command import server_command
from preft_cli.bench.online.load import Outcome, run_load, to_answer
from preft_cli.bench.online.readings import read_counters, read_settings
from preft_cli.bench.online.server import Server, bypass_proxies, server_environment
from preft_cli.bench.results import Latency
from preft_cli.bench.workload import Request
from preft_cli.config.schema import LoadConfig
from preft_cli.errors import UserError

BASE = BaseFingerprint(model_type="llama", hidden_size=16)

ARGS: dict[str, Any] = {
    "model": "/models/tiny", "dtype": "float32", "seed": 7, "max_model_len": 99, "max_num_seqs": 5,
    "tensor_parallel_size": 2, "enable_prefix_caching": False, "skip_tokenizer_init": True, "load_format": "dummy",
    "enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 123_456_789, "gpu_memory_utilization": 0.55,
    "enable_lora": True, "max_loras": 3, "max_lora_rank": 64, "max_cpu_loras": 1000,
    "compilation_config": {"cudagraph_specialize_lora": False},
}  # fmt: skip


def spec(folder: Path, adapters: list[Path], *, plugin: bool = False, **args: Any) -> EngineSpec:
    made = {"arm": "x", "mode": "online", "engine_args": ARGS | args, "adapters": adapters, "plugin": plugin}
    return EngineSpec.model_validate({**made, "scratch": folder})


def parsed(command: list[str], skip: int) -> Any:
    """What vLLM's own parser makes of the command, as its server does."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = parse_arguments(command[skip:])
    return arguments, AsyncEngineArgs.from_cli_args(arguments)


@pytest.mark.parametrize("caching", [False, True])
def test_the_server_gets_the_arguments_of_the_offline_engine(tmp_path: Path, caching: bool) -> None:
    from vllm.engine.arg_utils import EngineArgs

    made = spec(tmp_path, [], enable_prefix_caching=caching)
    arguments, found = parsed(server_command(made, 1234), 3)
    expected = EngineArgs(**made.engine_args)
    assert {name: getattr(found, name) for name in ARGS} == {name: getattr(expected, name) for name in ARGS}
    assert (arguments.host, arguments.port, arguments.served_model_name) == ("127.0.0.1", 1234, ["base"])


def test_ten_thousand_adapters_reach_the_stock_server(tmp_path: Path) -> None:
    folders = [tmp_path / f'it\'s, "{"long" * 30}"' / f"adapter-{index:05d}" for index in range(10_000)]
    command = server_command(spec(tmp_path, folders), 1)
    assert sum(map(len, command)) < 2000
    arguments, _ = parsed(command, 3)
    assert [(one.name, one.path) for one in arguments.lora_modules] == [(one.name, str(one)) for one in folders]


def test_preft_s_server_gets_a_manifest_and_the_plugin_s_options(tmp_path: Path) -> None:
    files = [tmp_path / f"adapter-{index}.preft" for index in range(2)]
    for index, file in enumerate(files):
        pair = LowRankPair(torch.full((2, 16), float(index)), torch.ones(16, 2), 1.0)
        write_adapter(file, Adapter(method="lorap", base=BASE, pairs={"model.layers.0.self_attn.q_proj": pair}))
    command = server_command(spec(tmp_path, files, plugin=True), 1)
    assert command[:3] == [sys.executable, "-m", "engine_patch.server"]
    manifest = Manifest.model_validate_json(Path(command[3]).read_text())
    assert {name: (one.path, one.digest) for name, one in manifest.adapters.items()} == {
        file.stem: (file, read_header(file).digest) for file in files
    }
    assert (manifest.base, manifest.base_names) == (BASE.to_dict(), ["base"])
    _, found = parsed(command, 4)
    options = {"host_pool_bytes": 1 << 30, "residual_stream": False, "all_token_adapters": False}
    assert found.additional_config == {"preft": options}


def test_preft_s_server_needs_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs adapters"):
        server_command(spec(tmp_path, [], plugin=True), 1)


class Answers(BaseHTTPRequestHandler):
    """A server whose model names say how it answers."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["model"] == "refused":
            self.send_error(400, "Bad Request")
            return
        self.send_response(200)
        self.end_headers()
        count = body["max_tokens"] - (body["model"] == "short")
        events: list[dict[str, Any]] = [{"choices": [{"text": ""}]}] * count
        if body["model"] != "broken":
            events.append({"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": len(body["prompt"])}})
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Answers.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def requests(count: int) -> list[Request]:
    return [Request(id=f"r-{i}", prompt_token_ids=[i, i + 1, i + 2], output_len=3 + i, adapter=i) for i in range(count)]


def load(url: str, models: list[str], **how: Any) -> Outcome:
    return run_load(url, requests(len(models)), models, LoadConfig.model_validate(how), closed_loop=2, seed=5)


def test_each_request_asks_for_its_adapter_prompt_and_length(url: str) -> None:
    outcome = load(url, ["a", "b", "a"])
    assert outcome.answers == [Answer(3, "length"), Answer(4, "length"), Answer(5, "length")]
    asked = sorted(Answers.asked, key=lambda body: body["prompt"])
    assert [body["prompt"] for body in asked] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]  # once each: no test request before
    assert [body["model"] for body in asked] == ["a", "b", "a"]
    assert [(body["min_tokens"], body["max_tokens"]) for body in asked] == [(3, 3), (4, 4), (5, 5)]
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in asked)


def test_latencies_are_in_order_and_goodput_is_within_its_limits(url: str) -> None:
    outcome = load(url, ["a"] * 6, goodput={"ttft": 60_000, "e2el": 60_000})
    assert isinstance(outcome.latency, Latency)
    for one in (outcome.latency.ttft_ms, outcome.latency.tpot_ms, outcome.latency.itl_ms, outcome.latency.e2el_ms):
        assert 0 <= one.p50 <= one.p90 <= one.p99
    assert outcome.latency.goodput == pytest.approx(6 / outcome.seconds)
    strict = load(url, ["a"] * 3, goodput={"e2el": 0.001}).latency
    assert strict is not None
    assert strict.goodput == 0
    unlimited = load(url, ["a"]).latency
    assert unlimited is not None
    assert unlimited.goodput is None


def test_answers_that_fail_say_why(url: str) -> None:
    outcome = load(url, ["a", "short", "broken", "refused"])
    assert outcome.answers == [Answer(3, "length"), Answer(3, None), Answer(0, None), Answer(0, "Bad Request")]


@pytest.mark.filterwarnings("ignore:All requests failed")
def test_a_run_in_which_all_fail_is_a_result_without_latency(url: str) -> None:
    outcome = load(url, ["refused"] * 3, goodput={"ttft": 1})
    assert outcome.answers == [Answer(0, "Bad Request")] * 3
    assert outcome.latency is None
    assert outcome.seconds > 0


def test_an_exception_is_told_by_its_last_line() -> None:
    trace = "Traceback (most recent call last):\n  File x\naiohttp.ServerDisconnectedError: gone\n"
    assert to_answer(requests(1)[0], 0, trace) == Answer(0, "aiohttp.ServerDisconnectedError: gone")


def test_arrivals_are_the_same_in_each_arm_and_others_for_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    from vllm.benchmarks import serve

    drawn: list[tuple[float, Any]] = []

    async def benchmark(**options: Any) -> dict[str, Any]:
        drawn.append((np.random.gamma(1.0), (options["request_rate"], options["max_concurrency"])))
        return {"duration": 1.0, "output_lens": [1], "errors": [""], "completed": 0}

    monkeypatch.setattr(serve, "benchmark", benchmark)
    for first in ("rep0-0", "rep0-0", "rep1-0"):
        made = [Request(id=first, prompt_token_ids=[1], output_len=1, adapter=0)]
        run_load("http://x", made, ["base"], LoadConfig(request_rate=4), closed_loop=2, seed=5)
    (one, how), (same, _), (other, _) = drawn
    assert how == (4, None)
    assert one == same != other


METRICS = """\
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 1.0
vllm:num_preemptions_created{engine="0"} 1.7e9
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0"} 100.0
vllm:prompt_tokens_total{engine="1"} 20.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0"} 120.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} 32.0
"""
TIERS = """\
# TYPE preft_tier_misses counter
preft_tier_misses_total{worker="0",tier="device"} 5.0
preft_tier_misses_total{worker="0",tier="host"} 2.0
preft_tier_misses_total{worker="1",tier="device"} 6.0
preft_tier_misses_total{worker="1",tier="host"} 2.0
"""


def test_counters_are_summed_over_processes() -> None:
    counted = read_counters(METRICS + TIERS, tiers=True)
    assert (counted.preemptions, counted.prompt_tokens) == (1, 120)
    assert (counted.prefix_cache_queries, counted.prefix_cache_hits) == (120, 32)
    assert counted.adapter_loads == {"device": 11, "host": 4}
    assert read_counters(METRICS, tiers=False).adapter_loads is None


def test_a_counter_that_is_missing_is_not_zero() -> None:
    with pytest.raises(PreftError, match="preft_tier_misses_total"):
        read_counters(METRICS, tiers=True)


def test_settings_read_from_the_server_are_those_of_the_engine() -> None:
    import pydantic
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode

    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype="torch.float32", seed=0, enforce_eager=True, max_model_len=64)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    plain = pydantic.TypeAdapter(VllmConfig).dump_python(
        config, mode="json", fallback=lambda one: vars(one) if isinstance(one, SimpleNamespace) else str(one)
    )
    assert read_settings(json.dumps({"vllm_config": plain}).encode()) == engine_settings(config)


def started(code: str) -> Server:
    return Server([sys.executable, "-c", code], 9)  # nobody listens there


def test_a_server_that_ends_at_once_is_not_waited_for() -> None:
    with pytest.raises(UserError, match="exit code 3 before it was ready"):
        started("raise SystemExit(3)").wait_ready()


def test_a_server_that_does_not_stop_is_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_module, "STOP_S", 0.2)
    server = started(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    while "up" not in capfd.readouterr().out:
        assert server._process.poll() is None
    server.stop()
    assert server._process.poll() is not None
    with pytest.raises(UserError, match="has ended with exit code -9"):
        server.get("/metrics")


def test_the_server_takes_our_environment_but_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k")
    monkeypatch.setenv("PREFT_DISABLE", "1")
    found = server_environment()
    assert "VLLM_API_KEY" not in found
    assert (found["PREFT_DISABLE"], found["VLLM_SERVER_DEV_MODE"]) == ("1", "1")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "127.0.0.1"),
        ({"NO_PROXY": "a.b"}, "a.b,127.0.0.1"),
        ({"no_proxy": "*"}, "*"),
        ({"no_proxy": "127.0.0.1"}, "127.0.0.1"),
    ],
)
def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: str) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    bypass_proxies()
    assert os.environ["no_proxy"] == after
