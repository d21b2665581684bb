"""The tiers' counters in the server's `/metrics`.

Upstream publishes what the API server's process counts. Ours are counted in the workers, so they are fetched when somebody reads
the metrics, and not otherwise. Still fits while the app is vLLM's, with `/metrics` from Prometheus's default registry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

from engine_patch.directory import AdapterDirectory
from engine_patch.pool.counters import PoolCounters

logger = logging.getLogger("vllm.preft")

TIMEOUT_S = 5.0
"""How long somebody who reads the metrics waits for the engine."""

GAUGES = {"capacity_bytes": "Size of the tier.", "used_bytes": "Bytes in use.", "adapters": "Adapters in the tier now."}
COUNTERS = {
    "hits": "Adapters asked for that were there.",
    "misses": "Adapters that had to be brought in.",
    "evictions": "Adapters that had to leave.",
    "loaded_bytes": "Bytes brought in.",
}
POOL_COUNTERS = {
    "load_failures": "Adapter files that could not be loaded.",
    "step_waits": "Adapters that a step had to wait for.",
    "step_wait_seconds": "Seconds that steps waited for adapters.",
    "compactions": "Times that adapters were moved on the device to make room.",
}


class PoolCollector:
    """What Prometheus asks; holds the numbers that were fetched last."""

    def __init__(self, directory: AdapterDirectory) -> None:
        self._directory = directory
        self._workers: list[PoolCounters] = []

    async def refresh(self, engine_client: Any) -> None:
        """Fetch the numbers. An engine that does not answer leaves the last ones."""
        try:
            answers = await asyncio.wait_for(engine_client.collective_rpc("preft_count"), TIMEOUT_S)
            self._workers = [PoolCounters.model_validate(answer) for answer in answers]
        except Exception as error:
            logger.warning("the engine does not say what its adapter pools hold: %s", error)

    def collect(self) -> Iterator[Any]:
        """The metric families, one label for the worker and one for the tier."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for kinds, family in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, text in kinds.items():
                metric = family(f"preft_tier_{name}", text, labels=["worker", "tier"])
                for number, worker in enumerate(self._workers):
                    for tier in ("device", "host"):
                        metric.add_metric([str(number), tier], getattr(getattr(worker, tier), name))
                if name == "adapters":
                    metric.add_metric(["server", "files"], len(self._directory.served_names()))
                yield metric
        for name, text in POOL_COUNTERS.items():
            metric = CounterMetricFamily(f"preft_{name}", text, labels=["worker"])
            for number, worker in enumerate(self._workers):
                metric.add_metric([str(number)], getattr(worker, name))
            yield metric


class RefreshBeforeScrape:
    """ASGI middleware."""

    def __init__(self, app: Any, collector: PoolCollector) -> None:
        self._app, self._collector = app, collector

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/metrics"):
            await self._collector.refresh(scope["app"].state.engine_client)
        await self._app(scope, receive, send)


def attach(app: Any, directory: AdapterDirectory) -> None:
    """Publish the counters with the app's other metrics."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    collector = PoolCollector(directory)
    get_prometheus_registry().register(collector)
    app.add_middleware(RefreshBeforeScrape, collector=collector)
