"""Live adapters on tiers without an engine: what `LiveAdapter` asks of vLLM, in a few lines."""

from __future__ import annotations

from typing import Any

import pytest

from engine_patch import live
from engine_patch.base_model import BaseFingerprint
from engine_patch.live import LiveAdapter
from engine_patch.pool.tiers import AdapterTiers
from engine_patch.ref import AdapterRef
from engine_patch.scheduler import Acting


class Request:
    """In the engine: it waits, computes its prompt or decodes."""

    def __init__(self, adapter: Any) -> None:
        self.lora_request = adapter


class FakeEngine:
    """As an `LLM` and as its engine core."""

    def __init__(self, tiers: AdapterTiers) -> None:
        self.tiers = tiers
        self.llm_engine = self.scheduler = self
        self.vllm_config: Any = None
        self.requests: dict[str, Request] = {}
        self.preft_acting = Acting(self)

    def add(self, id_: str, adapter: Any, *, acts: bool = False) -> None:
        """A request comes; it `acts` if the next step may compute some of its adapted tokens."""
        self.requests[id_] = Request(adapter)
        if acts:
            self.preft_acting.requests[id_] = self.requests[id_]

    def abort_request(self, ids: list[str], internal: bool) -> None:
        """Ends them."""
        assert internal
        for id_ in ids:
            self.end(id_)

    def end(self, id_: str) -> None:
        """A request ends."""
        del self.requests[id_]
        self.preft_acting.requests.pop(id_, None)


def make_live(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, base: BaseFingerprint, method: str = "lorap", **options: Any
) -> LiveAdapter:
    """The adapter `policy` of an engine."""
    monkeypatch.setattr(live, "core_of", lambda llm: llm)
    monkeypatch.setattr(live, "tiers_of", lambda llm: llm.tiers)
    monkeypatch.setattr(live, "refuse_unproved", lambda config: None)
    return LiveAdapter(engine, "policy", method, base, **options)


def present(adapter: LiveAdapter) -> AdapterRef:
    """Its present version."""
    ref = adapter._present
    assert ref is not None
    return ref
