"""The routes by which a trainer learns what a name stands for, and ends requests on what it stood for before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_patch import adapter_routes
from engine_patch.errors import PreftError
from engine_patch.requests import lora_request
from engine_patch.store.file import write_adapter
from tests.unit.test_directory import Core, adapter, serving


class Engine:
    """An `AsyncLLM` that remembers what it was told to abort."""

    def __init__(self, *states: Any) -> None:
        self.engine_core, self.aborted = Core(), list[str]()
        self.output_processor = SimpleNamespace(request_states={state.request_id: state for state in states})

    async def abort(self, request_ids: list[str], internal: bool) -> None:
        assert internal
        self.aborted += request_ids


def state(request_id: str, lora: Any, parent: str | None = None) -> Any:
    parent_req = parent and SimpleNamespace(request_id=parent)
    return SimpleNamespace(request_id=request_id, lora_request=lora, parent_req=parent_req)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    write_adapter(folder / "x.preft", adapter(1))
    return folder


def client(store: Path, engine: Engine) -> Any:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    directory, models = serving(store)
    models.engine_client = engine
    app = FastAPI()
    app.state.engine_client, app.state.openai_serving_models = engine, models
    adapter_routes.add_routes(app, directory)
    return TestClient(app)


def test_a_name_stands_for_what_the_next_request_would_get(store: Path) -> None:
    ask = client(store, Engine())
    for seed in (1, 2):
        write_adapter(store / "x.preft", adapter(seed))
        answer = ask.get("/preft/adapters/x")
        found = {"name": "x", "method": "lorap", "digest": adapter(seed).digest(), "path": str(store / "x.preft")}
        assert (answer.status_code, answer.json()) == (200, found)


@pytest.mark.parametrize("path", ["/preft/adapters/{}", "/preft/adapters/{}/abort"])
def test_unknown_names_and_files_that_cannot_be_served_are_errors(store: Path, path: str) -> None:
    engine = Engine()
    ask = client(store, engine)
    write_adapter(store / "pirate.preft", adapter(3))
    method = ask.post if path.endswith("abort") else ask.get
    answer = method(path.format("pirat"))
    assert answer.status_code == 404
    assert answer.json() == {"error": f"no adapter 'pirat' in {store}. Did you mean pirate?"}
    assert method(path.format("the-base")).status_code == 404
    (store / "x.preft").write_bytes((store / "x.preft").read_bytes()[:-1])
    answer = method(path.format("x"))
    assert answer.status_code == 400
    assert "truncated or half-written" in answer.json()["error"]
    assert not engine.aborted


def test_requests_on_former_contents_of_that_name_alone_are_aborted(store: Path, tmp_path: Path) -> None:
    for name, seed in (("former", 1), ("now", 2)):
        write_adapter(tmp_path / f"{name}.preft", adapter(seed))
    former, now = lora_request("x", tmp_path / "former.preft"), lora_request("x", tmp_path / "now.preft")
    other = lora_request("y", tmp_path / "former.preft")
    engine = Engine(
        state("base", None),
        state("one", former),
        state("0_several", former, "several"),
        state("1_several", former, "several"),
        state("present", now),
        state("other", other),
    )
    ask = client(store, engine)
    write_adapter(store / "x.preft", adapter(2))
    answer = ask.post("/preft/adapters/x/abort").json()
    assert answer == {"name": "x", "digest": adapter(2).digest(), "aborted": 2}
    assert engine.aborted == ["one", "several"]


@pytest.mark.usefixtures("upstream")
def test_the_api_key_guards_these_routes_too() -> None:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: Any) -> None:
        return None

    def ask(path: str, *headers: tuple[bytes, bytes]) -> bool:
        scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
        passed.clear()
        asyncio.run(AuthenticationMiddleware(app, ["secret"])(scope, None, send))  # type: ignore[arg-type]
        return bool(passed)

    assert ask("/preft/adapters/x/abort")  # upstream leaves it open
    adapter_routes.guard()
    adapter_routes.guard()
    for path in ("/preft/adapters/x", "/preft/adapters/x/abort", "/v1/models"):
        assert not ask(path)
        assert ask(path, (b"authorization", b"Bearer secret"))
    assert ask("/preft/status")


def test_a_path_that_is_no_adapter_of_ours_is_an_error_and_not_passed_over() -> None:
    broken = state("one", SimpleNamespace(lora_name="x", lora_path="/a.preft#preft=nonsense:1"))
    with pytest.raises(PreftError, match="does not name an adapter"):
        adapter_routes.former_requests(Engine(broken).output_processor, "x", "d")
