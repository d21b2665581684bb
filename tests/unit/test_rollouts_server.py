"""Rollouts from a server, against a fake one: what is sent, and what is said when something is wrong."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.store.file import read_adapter, read_header, write_adapter
from preft_cli.errors import UserError
from preft_cli.rl.rollout import Rollout, Sampling
from preft_cli.rl.rollouts import api
from preft_cli.rl.rollouts.api import KEY_VARIABLE, Api
from preft_cli.rl.rollouts.seeds import prompt_seed
from preft_cli.rl.rollouts.server import ServerRollouts
from preft_cli.rl.rollouts.tokens_route import GENERATE
from tests.unit.test_status import LIVE

BASE = BaseFingerprint(hidden_size=64, weights="w1")
SAMPLING = Sampling(max_tokens=5, temperature=0.6, top_p=0.9, top_k=7, min_p=0.1)
MODULE = "model.layers.0.self_attn.q_proj"


class Fake:
    """A server that serves what lies in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status: dict[str, Any] = LIVE | {"engine": LIVE["engine"] | {"base": BASE.to_dict()}}  # type: ignore[operator]
        self.asked: list[tuple[str, str, Any]] = []
        self.losses = 0
        """Connections that it will close without an answer."""
        self.keys: set[str | None] = set()
        self.generate: Callable[[Any], tuple[int, Any]] = answer
        self.served: Callable[[str], tuple[int, Any]] = self.present

    def present(self, name: str) -> tuple[int, Any]:
        file = self.folder / f"{name}.preft"
        if not file.exists():
            return 404, {"error": f"no adapter {name!r} in {self.folder}."}
        header = read_header(file)
        return 200, {"name": name, "method": header.method, "digest": header.digest, "path": str(file)}

    def reply(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append((method, path, body))
        if path == "/preft/status":
            return 200, self.status
        if path == "/v1/models":
            return 200, {"data": [{"id": "the-base"}, {"id": "other", "parent": "the-base"}]}
        if path == GENERATE:
            return self.generate(body)
        name, _, abort = path.removeprefix("/preft/adapters/").partition("/")
        assert abort == ("abort" if method == "POST" else "")
        return self.served(name)

    def sent(self, path: str) -> list[Any]:
        return [body for _, at, body in self.asked if at == path]


def answer(body: Any) -> tuple[int, Any]:
    """Each answer has the prompt's length for its first token."""
    return 200, {
        "choices": [
            choice(index, [len(body["token_ids"]), index]) for index in reversed(range(body["sampling_params"]["n"]))
        ]
    }


def choice(index: int, tokens: list[int], reason: str = "stop", logprob: float = -0.5) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": logprob, "top_logprobs": []} for token in tokens]
    return {"index": index, "token_ids": tokens, "finish_reason": reason, "logprobs": {"content": content}}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_AFTER_S", (0.01, 0.01, 0.01))


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    folder = tmp_path / "adapters"
    folder.mkdir()
    return Fake(folder)


@pytest.fixture
def url(fake: Fake) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.respond("GET", None)

        def do_POST(self) -> None:
            self.respond("POST", json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null"))

        def respond(self, method: str, body: Any) -> None:
            if fake.losses > 0:
                fake.losses -= 1
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            fake.keys.add(self.headers.get("Authorization"))
            status, document = fake.reply(method, self.path, body)
            data = document if isinstance(document, bytes) else json.dumps(document).encode()
            try:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                return  # hung up on

        def log_message(self, *args: Any) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 128

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def pairs(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, LowRankPair]:
    torch.manual_seed(seed)
    a, b = torch.randn(2, 64, dtype=dtype), torch.randn(64, 2, dtype=dtype)
    return {MODULE: LowRankPair(a.requires_grad_(), b.requires_grad_(), 1.0)}


def connect(url: str, store: Path, in_flight: Any = "finish", **more: Any) -> ServerRollouts:
    return ServerRollouts(
        url,
        store,
        "policy",
        "lorap",
        BASE,
        more.pop("trained_in", "float32"),
        in_flight,
        **{"sync_timeout_s": 0.2, **more},
    )


def test_weights_arrive_in_the_servers_dtype_and_are_seen_before_sync_ends(url: str, fake: Fake) -> None:
    fake.status["engine"]["dtype"] = "bfloat16"
    rollouts = connect(url, fake.folder)
    assert not list(fake.folder.iterdir())
    for seed in (1, 2):
        synced = rollouts.sync(pairs(seed))
        adapter = read_adapter(fake.folder / "policy.preft")
        assert (adapter.dtype, adapter.method, adapter.base) == ("bfloat16", "lorap", BASE)
        assert torch.equal(adapter.pairs[MODULE].a, pairs(seed)[MODULE].a.bfloat16())
        assert synced.digest == adapter.digest()
        assert synced.num_bytes >= 4 * 64 * 2
        assert ("GET", "/preft/adapters/policy", None) in fake.asked
        fake.asked.clear()
    rollouts.stop()
    assert not list(fake.folder.iterdir())
    connect(url, fake.folder, dtype="float16").sync(pairs(1))
    assert read_header(fake.folder / "policy.preft").dtype == "float16"


@pytest.mark.parametrize(("in_flight", "aborts"), [("finish", 0), ("abort", 1)])
def test_requests_in_flight_are_aborted_where_asked_for(url: str, fake: Fake, in_flight: str, aborts: int) -> None:
    connect(url, fake.folder, in_flight).sync(pairs(1))
    assert len(fake.sent("/preft/adapters/policy/abort")) == aborts


def test_everything_that_decides_what_is_drawn_is_sent(url: str, fake: Fake) -> None:
    rollouts = connect(f"{url}/v1/", fake.folder)
    rollouts.sync(pairs(1))
    prompts = [[1, 2, 3], [4], [4]]
    found = rollouts.generate(prompts, 2, SAMPLING, seed=9)
    assert found == [[Rollout([len(prompt), index], [-0.5, -0.5]) for index in (0, 1)] for prompt in prompts]
    bodies = fake.sent(GENERATE)
    assert sorted(body["token_ids"] for body in bodies) == sorted(prompts)
    assert {body["model"] for body in bodies} == {"policy"}
    for body in bodies:
        assert body["sampling_params"] | {"seed": 0} == {
            "n": 2, "seed": 0, "max_tokens": 5, "temperature": 0.6, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [], "logprobs": 0,
            "detokenize": False,
        }  # fmt: skip
    assert {body["sampling_params"]["seed"] for body in bodies} == {prompt_seed(9, index) for index in range(3)}
    fake.asked.clear()
    rollouts.generate(prompts, 2, SAMPLING, seed=9, adapted=False)
    assert {body["model"] for body in fake.sent(GENERATE)} == {"the-base"}
    assert rollouts.generate([], 2, SAMPLING, seed=9) == []


def test_the_most_likely_answer_is_drawn_once(url: str, fake: Fake) -> None:
    """vLLM refuses several."""
    rollouts = connect(url, fake.folder)
    rollouts.sync(pairs(1))
    found = rollouts.generate([[1, 2]], 3, Sampling(5, 0.0), seed=1)
    assert found == [[Rollout([2, 0], [-0.5, -0.5])] * 3]
    assert [body["sampling_params"]["n"] for body in fake.sent(GENERATE)] == [1]


def test_seeds_of_prompts_and_calls_are_far_apart() -> None:
    seeds = {prompt_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert min(abs(a - b) for a, b in zip(sorted(seeds), sorted(seeds)[1:], strict=False)) > 1000


def test_requests_are_sent_at_once_and_the_first_failure_ends_all(url: str, fake: Fake) -> None:
    arrived = threading.Barrier(20)
    release = threading.Event()

    def generate(body: Any) -> tuple[int, Any]:
        arrived.wait(20)
        if body["token_ids"] == [7]:
            return 400, {"error": {"message": "this is wrong", "code": 400}}
        release.wait(20)
        return answer(body)

    rollouts = connect(url, fake.folder)
    rollouts.sync(pairs(1))
    fake.generate = generate
    began = time.monotonic()
    with pytest.raises(UserError, match=r"/inference/v1/generate answers 400: this is wrong"):
        rollouts.generate([[number] for number in range(20)], 1, SAMPLING, seed=1)
    assert time.monotonic() - began < 10
    release.set()


def test_one_timeout_for_all(url: str, fake: Fake) -> None:
    rollouts = connect(url, fake.folder, timeout_s=0.2)
    rollouts.sync(pairs(1))
    release = threading.Event()
    fake.generate = lambda body: (release.wait(20), answer(body))[1]
    with pytest.raises(UserError, match="gave no answer in time"):
        rollouts.generate([[1], [2]], 1, SAMPLING, seed=1)
    release.set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, r"logprobs-mode is raw_logprobs\); start it with: preft serve --set"),
        ({"tokens_route": False}, r"\(enable-scale-out is false\); start it with: .*vllm_args\.enable-scale-out=true"),
        ({"base": {"hidden_size": 128}}, "another base model than model.base: hidden_size is 64 here and 128 there"),
        ({"base": {"weights": "w2"}}, "digest w1 here and w2 there"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused(
    url: str, fake: Fake, change: dict[str, Any], message: str
) -> None:
    fake.status["engine"] |= change
    with pytest.raises(UserError, match=message):
        connect(url, fake.folder)


def test_a_server_that_computes_in_another_type_is_said(
    url: str, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.status["engine"]["dtype"] = "bfloat16"
    connect(url, fake.folder, trained_in="bfloat16")
    assert "computes in" not in capsys.readouterr().err
    connect(url, fake.folder, trained_in="float32")
    said = " ".join(capsys.readouterr().err.split())
    assert "computes in bfloat16 and the trainer in float32" in said
    assert "preft serve --set serve.dtype=float32, or set train.dtype=bfloat16 here" in said


def test_a_server_that_is_not_live_or_not_there_is_refused(url: str, fake: Fake) -> None:
    fake.status["live"] = False
    with pytest.raises(UserError, match="is not live"):
        connect(url, fake.folder)
    with pytest.raises(
        UserError,
        match=r"no server answers at http://127\.0\.0\.1:9.*\(preft serve starts one; train\.grpo\.rollout_url names",
    ):
        connect("http://127.0.0.1:9", fake.folder)
    for wrong in ("nonsense", "ftp://x", "http://[bad", "http://"):
        with pytest.raises(UserError, match="is not the address of a server"):
            connect(wrong, fake.folder)


def test_a_server_that_goes_away_is_said(url: str, fake: Fake) -> None:
    rollouts = connect(url, fake.folder)
    rollouts.sync(pairs(1))
    fake.generate = lambda body: (200, b"<html>")
    with pytest.raises(UserError, match="answers 200, and not as a server of preft does"):
        rollouts.generate([[1]], 1, SAMPLING, seed=1)
    with pytest.raises(UserError, match=r"no server answers at http://127\.0\.0\.1:9/x"):
        Api("http://127.0.0.1:9").get("/x")


def test_lost_connections_are_made_again_a_few_times(url: str, fake: Fake) -> None:
    rollouts = connect(url, fake.folder)
    rollouts.sync(pairs(1))
    fake.losses = 3
    assert rollouts.generate([[1, 2]], 1, SAMPLING, seed=1) == [[Rollout([2, 0], [-0.5, -0.5])]]
    fake.losses = 4
    with pytest.raises(UserError, match="no server answers at"):
        rollouts.generate([[1, 2]], 1, SAMPLING, seed=1)
    assert fake.losses == 0
    fake.asked.clear()
    fake.generate = lambda body: (500, {"error": "broken"})
    with pytest.raises(UserError, match="answers 500: broken"):
        rollouts.generate([[1, 2]], 1, SAMPLING, seed=1)
    assert len(fake.sent(GENERATE)) == 1


def test_a_call_that_was_hung_up_on_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_AFTER_S", (60.0,))
    call = api._Call(Api("http://127.0.0.1:9"), "POST", "/x")
    threading.Timer(0.05, call.hang_up).start()
    began = time.monotonic()
    with pytest.raises(UserError, match="no server answers at"):
        call.run(began + 120)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([choice(0, [1, 2])], "gave 1 answers for 2"),
        ([choice(0, [1, 2]), choice(1, [])], "gave 2 answers for 2, or not a log-probability for each token"),
        ([choice(0, [1, 2]), choice(1, [1], "abort")], r"before it was whole \(abort\)"),
        ([choice(0, [1, 2]), choice(1, [1], logprob=-9999.0)], "drew a token that has no probability"),
        ([choice(0, [1, 2]), choice(1, [1], logprob=float("nan"))], "drew a token that has no probability"),
        ([{"index": 0}, {"index": 1}], "does not answer as vLLM does"),
        ([choice(0, [1]), choice(1, [1]) | {"logprobs": None}], "does not answer as vLLM does"),
    ],
)
def test_answers_that_are_not_whole_are_refused(url: str, fake: Fake, choices: Any, message: str) -> None:
    rollouts = connect(url, fake.folder)
    rollouts.sync(pairs(1))
    fake.generate = lambda body: (200, {"choices": choices})
    with pytest.raises(UserError, match=message):
        rollouts.generate([[1]], 2, SAMPLING, seed=1)


def test_a_folder_that_is_not_the_servers_is_refused(url: str, fake: Fake, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(UserError, match=r"no adapter 'policy' in .*adapters\. Is train\.grpo\.rollout_store its"):
        connect(url, elsewhere).sync(pairs(1))
    connect(url, fake.folder).sync(pairs(1))
    with pytest.raises(UserError, match=r"it serves policy from .*adapters/policy\.preft, digest"):
        connect(url, elsewhere).sync(pairs(2))
    with pytest.raises(UserError, match=r"rollout_store: .*missing: no such folder"):
        connect(url, tmp_path / "missing")


def test_a_slow_file_system_is_waited_for(url: str, fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts = connect(url, fake.folder, sync_timeout_s=20)
    rollouts.sync(pairs(1))
    old, asked = fake.present("policy"), []

    def late(name: str) -> tuple[int, Any]:
        asked.append(name)
        return old if len(asked) < 5 else fake.present(name)

    fake.served = late
    synced = rollouts.sync(pairs(2))
    assert len(asked) == 5
    assert synced.digest != old[1]["digest"]


def test_what_the_server_refuses_is_said_at_once(url: str, fake: Fake) -> None:
    fake.served = lambda name: (400, {"error": "rank 64: raise serve.max_lora_rank"})
    with pytest.raises(UserError, match=r"does not serve .*policy\.preft: rank 64: raise serve\.max_lora_rank"):
        connect(url, fake.folder, sync_timeout_s=30).sync(pairs(1))


def test_answers_from_somebody_elses_weights_are_refused(url: str, fake: Fake) -> None:
    rollouts = connect(url, fake.folder)
    rollouts.sync(pairs(1))
    connect(url, fake.folder).sync(pairs(2))
    with pytest.raises(UserError, match=r"somebody else replaced or removed .*policy\.preft"):
        rollouts.generate([[1]], 1, SAMPLING, seed=1)
    rollouts.generate([[1]], 1, SAMPLING, seed=1, adapted=False)
    rollouts.stop()
    assert (fake.folder / "policy.preft").exists()  # not ours any more


def test_somebodys_adapter_is_not_written_over(url: str, fake: Fake) -> None:
    write_adapter(fake.folder / "policy.preft", Adapter("lorap", BASE, pairs(1), {"source": "trained"}))
    with pytest.raises(
        UserError, match=r"was not written for rollouts, and would be replaced; choose another adapter\.name"
    ):
        connect(url, fake.folder)
    with pytest.raises(UserError, match=r"adapter name '\.\./x' is not allowed"):
        ServerRollouts(url, fake.folder, "../x", "lorap", BASE, "float32")


def test_prompts_that_the_engine_would_cut_are_refused(url: str, fake: Fake) -> None:
    rollouts = connect(url, fake.folder)
    rollouts.sync(pairs(1))
    limit = fake.status["engine"]["max_model_len"]
    rollouts.generate([[1] * (limit - 5)], 1, SAMPLING, seed=1)
    with pytest.raises(
        UserError, match=rf"a prompt of {limit - 4} tokens and an answer of 5 .* than the {limit} tokens"
    ):
        rollouts.generate([[1], [1] * (limit - 4)], 1, SAMPLING, seed=1)


def test_the_api_key_is_sent(url: str, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k")
    connect(url, fake.folder).sync(pairs(1))
    assert "Bearer k" in fake.keys
    fake.served = lambda name: (401, {"error": "Unauthorized"})
    with pytest.raises(UserError, match=f"wants the server's API key: set {KEY_VARIABLE}"):
        connect(url, fake.folder).sync(pairs(1))
