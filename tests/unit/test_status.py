"""`preft status` against servers that are live, half live, broken, or not ours."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patch.pool.counters import PoolCounters, TierCounters
from preft_cli.app import main

PROCESS = {"live": True, "role": "engine core", "pid": 7, "missing": [], "patched": ["a"]}
ADAPTERS = {"listed": 3, "admitted": 1, "gpu_slots": 2}
POOLS = PoolCounters(
    device=TierCounters(capacity_bytes=64_000_000, used_bytes=16_000_000, adapters=2, hits=9, misses=1),
    host=TierCounters(capacity_bytes=256_000_000),
).model_dump()
ENGINE = {
    "base": {"hidden_size": 64}, "dtype": "float32", "max_model_len": 99, "logprobs_mode": "processed_logprobs",
    "tokens_route": True,
}  # fmt: skip
LIVE = {
    "live": True, "preft": "0.1.0", "vllm": "vllm 0.32.0", "prefix_caching": True, "engine": ENGINE, "adapters": ADAPTERS,
    "pools": [POOLS], "processes": [PROCESS],
}  # fmt: skip
HALF = LIVE | {
    "live": False,
    "processes": [PROCESS, PROCESS | {"live": False, "pid": 8, "missing": ["x.Scheduler.schedule"]}],
}


class Answers(BaseHTTPRequestHandler):
    status, body = 200, b""

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/preft/status" else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def ask(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["status", *arguments])
    return ended.value.code


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(("status", "answer", "code"), [(200, LIVE, 0), (503, HALF, 1)])
def test_says_what_each_process_says(
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    answer: Any,
    code: int,
    as_json: bool,
) -> None:
    monkeypatch.setattr(Answers, "status", status)
    monkeypatch.setattr(Answers, "body", json.dumps(answer).encode())
    assert ask("--url", server + "/", *(["--json"] if as_json else [])) == code
    said = capsys.readouterr().out
    if as_json:
        assert json.loads(said) == answer
    else:
        assert "3 adapters listed, 1 asked for so far, 2 slots; prefix caching on" in said
        assert "worker 0: device 16.0 of 64.0 MB, 2 adapters, 90% hits; host 0.0 of 256.0 MB, 0 adapters\n" in said
        assert ("NOT LIVE process 8, engine core, missing: x.Scheduler.schedule" in said) == (code == 1)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"{}", "answers 404: no server of preft"),
        (200, b"<html>", "does not answer as a server of preft does"),
        (200, b'{"live": true}', "does not answer as a server of preft does"),
        (200, json.dumps(LIVE | {"processes": []}).encode(), "does not answer as a server of preft does"),
        (200, b"[" * 100_000, "does not answer as a server of preft does"),
        (200, b"[1]", "does not answer as a server of preft does"),
        (503, b'{"live": false, "error": "the engine is dead"}', "not live: the engine is dead"),
        (500, b"oops", "answers 500"),
    ],
)
def test_says_what_is_wrong(
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    body: bytes,
    message: str,
) -> None:
    monkeypatch.setattr(Answers, "status", status)
    monkeypatch.setattr(Answers, "body", body)
    assert ask("--url", server) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "ftp://x", "http://[bad"])
def test_no_server_is_said(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("--url", url) == 1
    assert f"no server answers at {url}" in capsys.readouterr().err


def test_the_config_names_the_server(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Answers, "body", json.dumps(LIVE).encode())
    assert ask("--set", f"serve.port={server.rsplit(':', 1)[1]}") == 0
    assert ask("--url", f"{server}/v1") == 0  # as the ready line prints it
    assert f"{server}: live" in capsys.readouterr().out


class Engine:
    """An engine client that answers for one core and one worker, or fails."""

    vllm_config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        lora_config=SimpleNamespace(max_loras=2),
        model_config=SimpleNamespace(dtype="torch.float32", max_model_len=99, logprobs_mode="processed_logprobs"),
    )

    def __init__(self, *live: bool) -> None:
        self.engine_core, self._live = self, live

    async def call_utility_async(self, method: str) -> Any:
        if not self._live:
            raise RuntimeError("the engine is dead")
        return PROCESS | {"live": self._live[0]}

    async def collective_rpc(self, method: str) -> list[Any]:
        if method == "preft_count":
            return [POOLS for _ in self._live[1:]]
        return [PROCESS | {"live": live} for live in self._live[1:]]


@pytest.mark.parametrize(("live", "code"), [((True, True), 200), ((True, False), 503), ((False, True), 503), ((), 503)])
def test_the_route_answers_200_only_if_every_process_is_live(live: tuple[bool, ...], code: int) -> None:
    testclient = pytest.importorskip("fastapi.testclient")
    from fastapi import FastAPI

    from engine_patch.status_route import add_route

    app = FastAPI()
    app.state.engine_client, app.state.args = Engine(*live), SimpleNamespace(enable_scale_out=True)
    manifest = SimpleNamespace(base={"hidden_size": 64})
    add_route(app, SimpleNamespace(served_names=lambda: {"a", "b"}, admitted={"a": 1}, manifest=manifest))  # type: ignore[arg-type]
    answer = testclient.TestClient(app).get("/preft/status")
    assert answer.status_code == code
    assert answer.json()["live"] == (code == 200)
    if live:
        assert answer.json()["adapters"] == {"listed": 2, "admitted": 1, "gpu_slots": 2}
        assert answer.json()["engine"] == ENGINE
    else:
        assert "the engine is dead" in answer.json()["error"]
