"""Which content a model name stands for, request by request."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_patch.adapter import Adapter, LoraPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.frontend import AdapterDirectory, file_stamp
from engine_patch.ref import parse_ref
from engine_patch.store.file import write_adapter

pytest.importorskip("vllm")

BASE = BaseFingerprint(hidden_size=4, weights="w1")


def adapter(seed: int, base: BaseFingerprint = BASE) -> Adapter:
    torch.manual_seed(seed)
    return Adapter("lorap", base, {"model.layers.0.q_proj": LoraPair(torch.randn(2, 4), torch.randn(4, 2), 1.0)})


class Engine:
    """Takes its time to load, and remembers what."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def add_lora(self, request: Any) -> None:
        await asyncio.sleep(0.05)
        ref = parse_ref(request.lora_path)
        assert ref
        self.loaded.append(ref.digest)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "x.preft", adapter(1))
    return tmp_path


def serving(store: Path) -> tuple[AdapterDirectory, Any]:
    directory = AdapterDirectory({"x": store / "x.preft"}, BASE, store / "live")
    return directory, SimpleNamespace(engine_client=Engine(), lora_requests={})


async def digest(directory: AdapterDirectory, models: Any) -> str:
    """What a request for `x` is answered with."""
    await directory.admit(models, "x")
    ref = parse_ref(models.lora_requests["x"].lora_path)
    assert ref
    return ref.digest


def test_requests_at_the_moment_of_a_replacement_all_get_the_new_content(store: Path) -> None:
    directory, models = serving(store)

    async def story() -> list[str]:
        first = await digest(directory, models)
        write_adapter(store / "x.preft", adapter(2))
        return [first, *await asyncio.gather(*(digest(directory, models) for _ in range(3)))]

    assert asyncio.run(story()) == [adapter(1).digest(), *[adapter(2).digest()] * 3]
    assert models.engine_client.loaded == [adapter(1).digest(), adapter(2).digest()]


def test_the_engine_keeps_a_file_of_its_own(store: Path) -> None:
    directory, models = serving(store)
    asyncio.run(digest(directory, models))
    ref = parse_ref(models.lora_requests["x"].lora_path)
    write_adapter(store / "x.preft", adapter(2))
    assert ref
    assert ref.path.parent == store / "live"
    assert directory.paths["x"].read_bytes() != ref.path.read_bytes()


def test_a_file_of_another_base_model_is_never_admitted(store: Path) -> None:
    directory, models = serving(store)
    write_adapter(store / "x.preft", adapter(1, BaseFingerprint(hidden_size=4, weights="w2")))
    with pytest.raises(PreftError, match="belongs to another base model"):
        asyncio.run(directory.admit(models, "x"))
    assert not models.engine_client.loaded


def test_a_failed_load_is_tried_again(store: Path) -> None:
    directory, models = serving(store)
    works, models.engine_client = models.engine_client, SimpleNamespace(add_lora=None)
    with pytest.raises(PreftError, match="adapter 'x' cannot be served"):
        asyncio.run(directory.admit(models, "x"))
    models.engine_client = works
    assert asyncio.run(digest(directory, models)) == adapter(1).digest()


def test_a_file_replaced_while_it_is_admitted_is_read_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between reading the header and linking the file: nobody is told to ask again."""
    directory, models = serving(store)
    upstream = AdapterDirectory.request

    def replaced_meanwhile(self: AdapterDirectory, name: str) -> Any:
        request = upstream(self, name)
        monkeypatch.setattr(AdapterDirectory, "request", upstream)
        write_adapter(store / "x.preft", adapter(2))
        return request

    monkeypatch.setattr(AdapterDirectory, "request", replaced_meanwhile)
    assert asyncio.run(digest(directory, models)) == adapter(2).digest()
    assert directory.admitted["x"] == file_stamp(store / "x.preft")


def test_a_file_of_another_chat_template_is_not_admitted_later_either(store: Path) -> None:
    directory, models = serving(store)
    directory._template = "t1"
    asyncio.run(digest(directory, models))  # names none
    write_adapter(store / "x.preft", dataclasses.replace(adapter(2), meta={"chat_template_digest": "t2"}))
    with pytest.raises(PreftError, match="trained with another chat template"):
        asyncio.run(digest(directory, models))


def test_a_file_that_vanishes_while_it_is_admitted_is_a_refusal(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, models = serving(store)
    upstream = AdapterDirectory.request

    def vanishing(self: AdapterDirectory, name: str) -> Any:
        request = upstream(self, name)
        (store / "x.preft").unlink()
        return request

    monkeypatch.setattr(AdapterDirectory, "request", vanishing)
    with pytest.raises(PreftError, match="adapter 'x' cannot be read: No such file"):
        asyncio.run(digest(directory, models))
