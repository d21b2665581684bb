"""What the tiers count: the numbers behind `/metrics` and `preft status`."""

from __future__ import annotations

from pydantic import BaseModel


class TierCounters(BaseModel):
    """One tier of one worker."""

    capacity_bytes: int
    used_bytes: int = 0
    adapters: int = 0
    """Adapters that are in it now."""
    hits: int = 0
    """Adapters asked for that were there."""
    misses: int = 0
    """Adapters that had to be brought in."""
    evictions: int = 0
    loaded_bytes: int = 0
    """All bytes ever brought in."""


class PoolCounters(BaseModel):
    """All tiers of one worker."""

    device: TierCounters
    host: TierCounters
    load_failures: int = 0
    """Files that could not be loaded."""
    step_waits: int = 0
    """Adapters that a step had to wait for, since they were not loaded ahead."""
    step_wait_seconds: float = 0.0
    compactions: int = 0
    """Times that the device pool had to move adapters to make one hole of many."""
