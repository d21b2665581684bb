"""vLLM's scheduler with the gate before it: who waits for a file, who goes on, who fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_patch import prefix_cache, readiness, scheduler
from engine_patch.pool.tiers import NOT_YET
from engine_patch.readiness import AdapterGate
from engine_patch.ref import parse_ref
from tests.unit.scheduling import Scheduling, adapter


class Workers:
    """Two workers of an engine, each with files that have not arrived yet."""

    def __init__(self) -> None:
        self.missing: tuple[dict[str, str], dict[str, str]] = ({}, {})
        self.asked: list[tuple[list[str], list[str], float]] = []

    def want(self, running: list[str], waiting: list[str], patience: float) -> list[dict[str, str]]:
        self.asked.append((digests(running), digests(waiting), patience))
        return [{d: r for d, r in missing.items() if d in digests(waiting)} for missing in self.missing]


def digests(paths: list[str]) -> list[str]:
    return [ref.digest for ref in map(parse_ref, paths) if ref]


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def served(upstream: None, scheduler_model: Path, workers: Workers) -> Scheduling:
    prefix_cache.patch()
    scheduler.patch()
    readiness.patch()
    made = Scheduling(scheduler_model, slots=2)
    made.scheduler.preft_gate = AdapterGate(workers.want, [])
    return made


def test_a_request_waits_for_its_file_in_every_worker_and_others_do_not(served: Scheduling, workers: Workers) -> None:
    late = served.add([1] * 8, adapter("late"))
    ready, base = served.add([1] * 8, adapter("ready")), served.add([1] * 8)
    workers.missing = ({}, {"late": NOT_YET})
    assert served.step().keys() == {ready.request_id, base.request_id}
    assert workers.asked[-1][1] == ["late", "ready"]
    workers.missing = ({"late": NOT_YET}, {})
    assert late.request_id not in served.step()
    workers.missing = ({}, {})
    assert served.step()[late.request_id] == 8


def test_requests_that_wait_for_a_grammar_take_no_place_from_others(served: Scheduling, workers: Workers) -> None:
    blocked = [served.add([1] * 8, adapter(name)) for name in ("shared", "other")]
    for request in blocked:
        request.status = type(request.status).WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    served.add([1] * 8, adapter("third"))
    served.add([1] * 8, adapter("shared"))
    served.scheduler.preft_gate.ask(served.scheduler)
    assert workers.asked[-1][1] == ["third", "shared", "other"]


def test_a_failed_load_ends_the_requests_of_that_adapter_alone(
    served: Scheduling, workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [served.add([1] * 8, adapter("bad")) for _ in range(2)]
    good = served.add([1] * 8, adapter("good"))
    workers.missing = ({"bad": NOT_YET}, {"bad": "the file is damaged"})
    assert served.step().keys() == {good.request_id}
    assert [request.status.name for request in bad] == ["FINISHED_ERROR"] * 2
    assert served.step().keys() == {good.request_id}
    assert not served.scheduler.waiting


@pytest.mark.parametrize(
    ("settings", "request_", "message"),
    [
        (["speculative decoding"], adapter("a"), "prefill-only adapters are not served with speculative decoding"),
        ([], "stock", "is a stock adapter: convert it"),
    ],
)
def test_what_is_never_served_fails_with_its_reason(
    served: Scheduling, workers: Workers, settings: list[str], request_: Any, message: str, monkeypatch: Any
) -> None:
    from vllm.lora.request import LoRARequest

    said: list[str] = []
    monkeypatch.setattr(readiness.logger, "error", lambda text, *values: said.append(text % values))
    served.scheduler.preft_gate = AdapterGate(workers.want, settings)
    one = served.add([1] * 8, LoRARequest("s", 3, "/peft") if request_ == "stock" else request_)
    all_tokens = served.add([1] * 8, adapter("all", "lora"))
    assert served.step().keys() == {all_tokens.request_id}
    assert one.status.name == "FINISHED_ERROR"
    assert len(said) == 1
    assert message in said[0]


@pytest.mark.parametrize("second", [("b", 5), ("a", 6)])
def test_an_id_stands_for_one_content_and_a_content_for_one_id(
    served: Scheduling, workers: Workers, second: tuple[str, int]
) -> None:
    """vLLM finds weights by number: two of them for one slot, or two contents for one number, would be the wrong ones."""
    first = served.add([1] * 8, adapter("a", id_=5))
    again, other = served.add([1] * 8, adapter("a", id_=5)), served.add([1] * 8, adapter(second[0], id_=second[1]))
    assert served.step().keys() == {first.request_id, again.request_id}
    assert other.status.name == "FINISHED_ERROR"


def test_an_id_is_looked_at_wherever_its_request_stands(
    served: Scheduling, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind those that are asked for, with a content that has arrived for another request."""
    monkeypatch.setattr(readiness, "SCANNED", 1)
    first = served.add([1] * 8, adapter("a", id_=5))
    other = served.add([1] * 8, adapter("a", id_=6))
    assert served.step().keys() == {first.request_id}
    served.step()
    assert other.status.name == "FINISHED_ERROR"


def test_running_prompts_are_told_and_resting_requests_are_not(served: Scheduling, workers: Workers) -> None:
    long = served.add([1] * 100, adapter("long"))
    served.step()
    served.step()  # 64 tokens a step: the rest of the prompt
    assert workers.asked[-1][0] == ["long"]
    served.step()
    assert workers.asked[-1][0] == []
    asked = len(workers.asked)
    assert served.step() == {long.request_id: 1}
    assert len(workers.asked) == asked, "nobody waits and nothing changed, so nobody is asked"


def test_a_request_that_waits_for_its_file_is_not_taken_for_starved(served: Scheduling, workers: Workers) -> None:
    """Else others would be held back for it, though no slot is what it lacks."""
    for name in "ab":
        served.add([1] * 60, adapter(name, "lora"), max_tokens=60)
    late = served.add([1] * 8, adapter("late"))
    workers.missing = ({"late": NOT_YET}, {})
    for index in range(2 * scheduler.MAX_STEPS_PASSED):
        served.add([1] * 4, adapter("a", "lora"), max_tokens=2)
        served.step()
        assert getattr(late, "preft_steps_passed", 0) == 0, index


def test_adapters_beyond_the_window_wait_their_turn(
    served: Scheduling, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "SCANNED", 2)
    requests = [served.add([1] * 4, adapter(name), max_tokens=4) for name in "abcd"]
    assert served.step().keys() == {request.request_id for request in requests[:2]}
    assert workers.asked[0][1] == ["a", "b"]
    assert {request.request_id for request in requests[2:]} <= served.step().keys()


def test_an_idle_engine_waits_for_the_file_rather_than_spin(served: Scheduling, workers: Workers) -> None:
    served.add([1] * 8, adapter("a"))
    workers.missing = ({"a": NOT_YET}, {})
    served.step()
    assert workers.asked[-1][2] > 0
    base = served.add([1] * 8)
    assert served.step().keys() == {base.request_id}
    assert workers.asked[-1][2] == 0, "a request that needs no file does not wait for one"
    served.step()
    assert workers.asked[-1][2] == 0
