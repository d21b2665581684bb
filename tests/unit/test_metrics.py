"""The pools' counters among the server's metrics, fetched when they are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patch.metrics import PoolCollector, RefreshBeforeScrape
from engine_patch.pool.counters import PoolCounters, TierCounters


class Engine:
    """Counts how often it is asked; fails on request."""

    def __init__(self) -> None:
        self.asked, self.dead = 0, False

    async def collective_rpc(self, method: str) -> list[Any]:
        assert method == "preft_count"
        if self.dead:
            raise RuntimeError("the engine is dead")
        self.asked += 1
        tier = TierCounters(capacity_bytes=100, used_bytes=40, adapters=2, hits=self.asked, misses=3, evictions=1)
        return [PoolCounters(device=tier, host=tier, step_waits=5).model_dump() for _ in range(2)]


@pytest.fixture
def client() -> Any:
    testclient = pytest.importorskip("fastapi.testclient")
    from fastapi import FastAPI
    from prometheus_client import CollectorRegistry, make_asgi_app

    app, registry = FastAPI(), CollectorRegistry()
    app.state.engine_client = Engine()
    collector = PoolCollector(SimpleNamespace(served_names=lambda: {"a", "b", "c"}))  # type: ignore[arg-type]
    registry.register(collector)
    app.add_middleware(RefreshBeforeScrape, collector=collector)
    app.mount("/metrics", make_asgi_app(registry))
    app.add_api_route("/health", lambda: {})
    made = testclient.TestClient(app)
    made.engine = app.state.engine_client
    return made


def test_every_worker_and_tier_is_there(client: Any) -> None:
    lines = client.get("/metrics/").text.splitlines()
    assert 'preft_tier_used_bytes{tier="device",worker="0"} 40.0' in lines
    assert 'preft_tier_hits_total{tier="host",worker="1"} 1.0' in lines
    assert 'preft_tier_adapters{tier="files",worker="server"} 3.0' in lines
    assert 'preft_step_waits_total{worker="1"} 5.0' in lines


def test_only_readers_of_the_metrics_cost_anything(client: Any) -> None:
    assert client.get("/health").status_code == 200
    assert client.engine.asked == 0
    client.get("/metrics/")
    assert 'preft_tier_hits_total{tier="host",worker="1"} 2.0' in client.get("/metrics/").text


def test_a_dead_engine_leaves_the_last_numbers(client: Any) -> None:
    client.get("/metrics/")
    client.engine.dead = True
    assert 'preft_tier_hits_total{tier="host",worker="1"} 1.0' in client.get("/metrics/").text
