"""Benchmarks that would not compare, or cannot work: refused before anything is measured, with fake engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preft_cli.bench import fit as fitting
from preft_cli.bench import run as running
from preft_cli.bench.adapters import check_distinct
from preft_cli.bench.comparable import SHARED_SETTINGS
from preft_cli.bench.worker import Event
from preft_cli.errors import UserError
from tests.unit.bench_engines import FakeEngines, config


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
