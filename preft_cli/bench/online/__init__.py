"""An engine behind its OpenAI server, under a load that arrives over time."""

from __future__ import annotations

from preft_cli.bench.online.engine import OnlineEngine

__all__ = ["OnlineEngine"]
