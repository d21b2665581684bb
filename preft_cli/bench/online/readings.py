"""What a running server says of itself: its settings and its counters."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from engine_patch.errors import PreftError
from preft_cli.bench.offline import COUNTED, TIERS, engine_settings
from preft_cli.bench.results import Counters


def read_settings(server_info: bytes) -> dict[str, Any]:
    """As offline, from the answer of `/server_info?config_format=json`: the resolved `VllmConfig` in plain data."""
    from vllm.config.compilation import CUDAGraphMode

    config = json.loads(server_info, object_hook=lambda fields: SimpleNamespace(**fields)).vllm_config
    config.device_config.device_type = config.device_config.device
    mode = config.compilation_config.cudagraph_mode
    config.compilation_config.cudagraph_mode = CUDAGraphMode(tuple(mode) if isinstance(mode, list) else mode)
    return engine_settings(config)


def read_counters(metrics: str, *, tiers: bool) -> Counters:
    """The counters in the answer of `/metrics`, each summed over the engine's processes.

    Args:
        metrics: in Prometheus' text form.
        tiers: whether to read preft's own, which the stock engine lacks.

    Raises:
        PreftError: a counter is missing: a zero in its place would be made up.
    """
    from prometheus_client.parser import text_string_to_metric_families

    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]

    def total(name: str, **labels: str) -> int:
        values = [one.value for one in samples if one.name == name and labels.items() <= one.labels.items()]
        if not values:
            raise PreftError(f"the server's /metrics has no {name}")
        return int(sum(values))

    loads = {tier: total("preft_tier_misses_total", tier=tier) for tier in TIERS} if tiers else None
    return Counters(**{field: total(f"{name}_total") for field, name in COUNTED.items()}, adapter_loads=loads)
