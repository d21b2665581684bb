"""Interrupted benchmarks, with fake engines: what was measured stays, and nothing of another plan is mixed in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preft_cli.bench import run as running
from preft_cli.bench.worker import Event
from preft_cli.errors import UserError
from tests.unit.bench_engines import FakeEngines, config


def crashing(engine: str, number: int) -> Callable[[str, Event], Event]:
    """One engine fails in one repetition; -1 is the warm-up."""

    def crash(name: str, event: Event) -> Event:
        if name == engine and event.repetition and event.repetition.number == number:
            raise UserError("the engine failed")
        return event

    return crash


def test_an_interrupted_run_goes_on(engines: FakeEngines, tmp_path: Path) -> None:
    asked = config(engines=2, repeats=1)
    result = tmp_path / "r.json"

    engines.change = crashing("lorap", -1)
    with pytest.raises(UserError, match="the engine failed"):
        running.bench(asked, tmp_path, result)
    assert engines.happened[-1] == "stop lorap at once"
    assert (tmp_path / "r.parts").is_dir()
    engines.change, engines.happened = lambda name, event: event, []
    running.bench(asked, tmp_path, result, resume=True)
    assert engines.happened[:2] == ["start base", "start lorap"]
    assert "lora 0" not in engines.happened
    assert result.exists()
    assert not (tmp_path / "r.parts").exists()


def test_an_interrupted_turn_is_done_again_and_no_other(engines: FakeEngines, tmp_path: Path) -> None:
    engines.change = crashing("lora", 1)
    with pytest.raises(UserError):
        running.bench(config(), tmp_path, tmp_path / "r.json")
    engines.change, engines.happened = lambda name, event: event, []
    result = running.bench(config(), tmp_path, tmp_path / "r.json", resume=True)
    turns = [f"{name} {number}" for number in (1, 2, 0) for name in ("base", "lora", "lorap")]
    assert engines.happened[3:-3] == turns
    assert [one.number for one in result.arms["lorap"].repetitions] == [0, 1, 2]
    assert len(result.arms["lorap"].started) == 2
    assert result.order == ["base", "lora", "lorap"] * 4


def test_a_run_goes_on_with_the_sizes_that_it_began_with(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.change = crashing("base", 1)
    with pytest.raises(UserError):
        running.bench(config(), tmp_path, tmp_path / "r.json")
    engines.change = lambda name, event: event
    monkeypatch.setattr(running, "fit", lambda *_: pytest.fail("sized anew"))
    running.bench(config(), tmp_path, tmp_path / "r.json", resume=True)


@pytest.mark.parametrize("other", [{"output_len": 3}, {"gpu_slots": 2}, {"lora_slots": 1}, {"dtype": "bfloat16"}])
def test_going_on_with_other_settings_is_refused(engines: FakeEngines, tmp_path: Path, other: dict[str, Any]) -> None:
    engines.change = crashing("lorap", -1)
    with pytest.raises(UserError):
        running.bench(config(engines=2, repeats=1), tmp_path, tmp_path / "r.json")
    with pytest.raises(UserError, match="other settings") as refused:
        running.bench(config(engines=2, repeats=1, **other), tmp_path, tmp_path / "r.json", resume=True)
    assert refused.value.exit_code == 2


def test_a_finished_run_is_not_measured_again(engines: FakeEngines, tmp_path: Path) -> None:
    first = running.bench(config(), tmp_path, tmp_path / "r.json")
    engines.happened.clear()
    assert running.bench(config(), tmp_path, tmp_path / "r.json", resume=True) == first
    assert engines.happened == []
    running.bench(config(output_len=3), tmp_path, tmp_path / "r.json", resume=True)
    assert engines.happened != []


def test_files_that_are_not_ours_stay(engines: FakeEngines, tmp_path: Path) -> None:
    (tmp_path / "r.parts").mkdir()
    (tmp_path / "r.parts" / "precious").touch()
    running.bench(config(), tmp_path, tmp_path / "r.json")
    assert [path.name for path in (tmp_path / "r.parts").iterdir()] == ["precious"]
