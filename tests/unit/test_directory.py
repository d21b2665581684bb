"""Which content a model name stands for, request by request, while the folder changes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from engine_patch import live_files
from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.directory import AdapterDirectory
from engine_patch.errors import PreftError
from engine_patch.frontend import admit, list_names
from engine_patch.manifest import Listed, Manifest
from engine_patch.ref import parse_ref
from engine_patch.store.file import read_header, write_adapter
from tests.unit.pools import layers, limits

BASE = BaseFingerprint(hidden_size=64, weights="w1")


def adapter(seed: int, base: BaseFingerprint = BASE, rank: int = 2) -> Adapter:
    torch.manual_seed(seed)
    module = "model.layers.0.self_attn.q_proj"
    return Adapter("lorap", base, {module: LowRankPair(torch.randn(rank, 64), torch.randn(64, rank), 1.0)})


class Core:
    """An engine core whose requests use some contents."""

    def __init__(self) -> None:
        self.used: list[str] = []

    async def call_utility_async(self, method: str) -> list[str]:
        assert method == "preft_in_use"
        return self.used


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    write_adapter(folder / "x.preft", adapter(1))
    return folder


def serving(store: Path, **more: Any) -> tuple[AdapterDirectory, Any]:
    header = read_header(store / "x.preft")
    listed = {"x": Listed(path=store / "x.preft", method=header.method, digest=header.digest)}
    manifest = Manifest(adapters=listed, store=store, base=BASE.to_dict(), base_names=["the-base"], **more)
    directory = AdapterDirectory(manifest, store.parent / "live")
    models = SimpleNamespace(engine_client=SimpleNamespace(engine_core=Core()), lora_requests={})
    list_names(directory, models.lora_requests)
    return directory, models


async def digest(directory: AdapterDirectory, models: Any, name: str = "x") -> str | None:
    """What a request for `name` is answered with; None: the name is unknown."""
    request = await admit(directory, models, name)
    assert models.lora_requests.get(name) is request
    ref = request and parse_ref(request.lora_path)
    return ref.digest if ref else None


def answered(directory: AdapterDirectory, models: Any, name: str = "x") -> str | None:
    return asyncio.run(digest(directory, models, name))


def test_requests_at_the_moment_of_a_replacement_all_get_the_new_content(store: Path) -> None:
    directory, models = serving(store)

    async def story() -> list[str | None]:
        first = await digest(directory, models)
        write_adapter(store / "x.preft", adapter(2))
        return [first, *await asyncio.gather(*(digest(directory, models) for _ in range(3)))]

    assert asyncio.run(story()) == [adapter(1).digest(), *[adapter(2).digest()] * 3]


def test_a_file_is_served_as_soon_as_it_is_there_and_unknown_as_soon_as_it_is_gone(store: Path) -> None:
    directory, models = serving(store)
    assert answered(directory, models, "new") is None
    write_adapter(store / "new.preft", adapter(3))
    assert answered(directory, models, "new") == adapter(3).digest()
    list_names(directory, models.lora_requests)
    assert sorted(models.lora_requests) == ["new", "x"]
    (store / "new.preft").unlink()
    (store / "x.preft").unlink()
    assert answered(directory, models, "new") is None
    assert answered(directory, models) is None
    list_names(directory, models.lora_requests)
    assert not models.lora_requests


def test_a_file_that_is_copied_slowly_is_refused_until_it_is_whole(store: Path) -> None:
    whole = (store / "x.preft").read_bytes()
    directory, models = serving(store)
    for end in (0, 100, 5000, len(whole) - 1):
        (store / "slow.preft").write_bytes(whole[:end])
        with pytest.raises(PreftError, match=r"truncated or half-written|is not a \.preft file"):
            answered(directory, models, "slow")
        list_names(directory, models.lora_requests)
        assert "slow" not in models.lora_requests
    (store / "slow.preft").write_bytes(whole)
    assert answered(directory, models, "slow") == adapter(1).digest()


def test_what_was_not_admitted_leaves_no_links(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is cut between the look at its header and the look at the link."""
    directory, models = serving(store)
    link = os.link

    def cut(source: Path, target: Path) -> None:
        link(source, target)
        os.truncate(source, 5000)

    monkeypatch.setattr(os, "link", cut)
    with pytest.raises(PreftError, match="truncated or half-written"):
        answered(directory, models)
    assert not list((store.parent / "live").iterdir())


def test_a_damaged_file_is_refused_with_its_name_and_served_once_it_is_mended(store: Path) -> None:
    directory, models = serving(store)
    whole = (store / "x.preft").read_bytes()
    (store / "x.preft").write_bytes(whole[:-9] + b"!" + whole[-8:])
    with pytest.raises(PreftError, match=r"is damaged: its content has the digest"):
        answered(directory, models)
    write_adapter(store / "x.preft", adapter(1))
    assert answered(directory, models) == adapter(1).digest()


@pytest.mark.parametrize("size", [0, 5000])
def test_a_file_that_is_cut_in_place_spoils_no_later_one_of_the_same_content(store: Path, size: int) -> None:
    directory, models = serving(store)
    answered(directory, models)
    os.truncate(store / "x.preft", size)  # our link is the same file
    with pytest.raises(PreftError):
        answered(directory, models)
    write_adapter(store / "x.preft", adapter(1))
    assert answered(directory, models) == adapter(1).digest()


def test_writing_into_a_file_spoils_no_later_one_of_the_same_content(store: Path) -> None:
    directory, models = serving(store)
    answered(directory, models)
    with (store / "x.preft").open("r+b") as file:  # our link is the same file
        file.seek(-9, 2)
        file.write(b"!")
    write_adapter(store / "x.preft", adapter(1))
    assert answered(directory, models) == adapter(1).digest()


@pytest.mark.parametrize("name", ["../x", "a/b", "a:b", "a b", "é", "", "the-base", ".x"])
def test_names_that_no_file_may_have_are_unknown(store: Path, name: str) -> None:
    write_adapter(store / "the-base.preft", adapter(5))
    (store.parent / "x.preft").write_bytes((store / "x.preft").read_bytes())
    directory, models = serving(store)
    assert answered(directory, models, name) is None
    assert "the-base" not in directory.names()


def test_a_link_that_leaves_the_folder_is_refused(store: Path) -> None:
    outside = store.parent / "outside.preft"
    write_adapter(outside, adapter(4))
    (store / "link.preft").symlink_to(outside)
    directory, models = serving(store)
    with pytest.raises(PreftError, match="is a symbolic link that leaves the folder"):
        answered(directory, models, "link")
    assert "link" not in models.lora_requests


def test_a_name_that_two_adapters_claim_stays_refused(store: Path) -> None:
    write_adapter(store / "twice.preft", adapter(3))
    directory, models = serving(store, reserved=["twice"])
    assert answered(directory, models, "twice") is None
    assert "twice" not in models.lora_requests


def test_converted_adapters_do_not_depend_on_the_folder(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "converted.preft", adapter(6))
    header = read_header(tmp_path / "converted.preft")
    listed = Listed(path=tmp_path / "converted.preft", method=header.method, digest=header.digest)
    manifest = Manifest(adapters={"converted": listed}, store=store, base=BASE.to_dict())
    directory = AdapterDirectory(manifest, store.parent / "live")
    assert directory.names() == {"converted", "x"}
    models = SimpleNamespace(engine_client=SimpleNamespace(engine_core=Core()), lora_requests={})
    (tmp_path / "converted.preft").unlink()  # pruned from the cache by another server
    assert answered(directory, models, "converted") == adapter(6).digest()
    write_adapter(store / "same.preft", adapter(6))
    answered(directory, models, "same")
    (store / "same.preft").unlink()
    monkeypatch.setattr(live_files, "GRACE_S", 0.0)
    directory.admitted.pop("converted")
    answered(directory, models, "same")
    answered(directory, models, "x")
    assert answered(directory, models, "converted") == adapter(6).digest()


def test_the_engine_keeps_a_file_of_its_own_until_no_request_uses_it(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_files, "GRACE_S", 0.0)
    directory, models = serving(store)
    core = models.engine_client.engine_core
    contents = [adapter(seed) for seed in range(1, 5)]
    live = store.parent / "live"
    core.used = [contents[0].digest()]  # a long answer began with the first
    for content in contents:
        write_adapter(store / "x.preft", content)
        assert answered(directory, models) == content.digest()
    assert {path.stem for path in live.iterdir()} == {contents[0].digest(), contents[-1].digest()}
    core.used = []
    write_adapter(store / "x.preft", adapter(9))
    answered(directory, models)
    assert [path.name for path in live.iterdir()] == [f"{adapter(9).digest()}.preft"]


def test_links_to_removed_adapters_go_too(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_files, "GRACE_S", 0.0)
    directory, models = serving(store)
    for index in range(8):
        write_adapter(store / f"n{index}.preft", adapter(10 + index))
        answered(directory, models, f"n{index}")
    for index in range(8):
        (store / f"n{index}.preft").unlink()
    list_names(directory, models.lora_requests)
    answered(directory, models)
    assert [path.stem for path in (store.parent / "live").iterdir()] == [adapter(1).digest()]
    assert set(directory.admitted) == {"x"}


def test_without_links_no_copies_pile_up(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def across(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", across)
    directory, models = serving(store)
    assert answered(directory, models) == adapter(1).digest()
    assert not list((store.parent / "live").iterdir())
    ref = parse_ref(models.lora_requests["x"].lora_path)
    assert ref
    assert ref.path == (store / "x.preft").resolve()


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (17, r"adapter 'x' has rank 17, this server holds up to 16; raise serve\.max_lora_rank"),
        (16, r"adapter 'x' takes 8192 bytes, and serve\.gpu_pool has 4096"),
        (8, None),
    ],
)
def test_what_does_not_fit_the_engine_is_refused_with_the_key_to_change(
    store: Path, rank: int, message: str | None
) -> None:
    directory, models = serving(store)
    known = limits(layers(), device_pages=1, host_pages=9, max_rank=16)
    directory.limits = known.model_copy(update={"base": BASE.to_dict()})
    write_adapter(store / "x.preft", adapter(1, rank=rank))
    if message is None:
        assert answered(directory, models) == adapter(1, rank=rank).digest()
        return
    with pytest.raises(PreftError, match=message):
        answered(directory, models)


def test_a_file_of_another_base_model_is_never_admitted(store: Path) -> None:
    directory, models = serving(store)
    write_adapter(store / "x.preft", adapter(1, BaseFingerprint(hidden_size=64, weights="w2")))
    with pytest.raises(PreftError, match="belongs to another base model"):
        answered(directory, models)


def test_a_file_replaced_while_it_is_admitted_is_read_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between reading the header and linking the file: nobody is told to ask again."""
    directory, models = serving(store)
    upstream = AdapterDirectory._checked

    def replaced_meanwhile(self: AdapterDirectory, name: str) -> Any:
        found = upstream(self, name)
        monkeypatch.setattr(AdapterDirectory, "_checked", upstream)
        write_adapter(store / "x.preft", adapter(2))
        return found

    monkeypatch.setattr(AdapterDirectory, "_checked", replaced_meanwhile)
    assert answered(directory, models) == adapter(2).digest()
    assert answered(directory, models) == adapter(2).digest()


def test_a_file_of_another_chat_template_is_not_admitted_later_either(store: Path) -> None:
    directory, models = serving(store, chat_template="t1")
    assert answered(directory, models)  # names none
    write_adapter(store / "x.preft", dataclasses.replace(adapter(2), meta={"chat_template_digest": "t2"}))
    with pytest.raises(PreftError, match="trained with another chat template"):
        answered(directory, models)


def test_a_file_that_vanishes_while_it_is_admitted_is_a_refusal(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, models = serving(store)
    upstream = AdapterDirectory._checked

    def vanishing(self: AdapterDirectory, name: str) -> Any:
        found = upstream(self, name)
        (store / "x.preft").unlink()
        return found

    monkeypatch.setattr(AdapterDirectory, "_checked", vanishing)
    with pytest.raises(PreftError, match="adapter 'x' cannot be read: No such file"):
        answered(directory, models)


def test_a_wrong_name_gets_the_nearest(store: Path) -> None:
    write_adapter(store / "pirate.preft", adapter(3))
    directory, _ = serving(store)
    assert directory.nearest("pirat") == " Did you mean pirate?"
