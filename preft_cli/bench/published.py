"""Throughput that the PreFT paper reports, to lay beside our own.

Source: "PreFT", arXiv 2605.14217, the table of throughput with 512 adapters, over that of multi-LoRA. Prompt
and output lengths, adapter slots and batch limits are not public, so the two compare in kind and not to the digit.
"""

from __future__ import annotations

from typing import NamedTuple

SOURCE = "arXiv 2605.14217"
NUM_ADAPTERS = 512
CAVEAT = f"Published points ({SOURCE}): 512 adapters; their prompt and output lengths and adapter slots are not public."


class Published(NamedTuple):
    """One row of the table."""

    model: str
    """As it is named in model names, in small letters."""
    hardware: str | None
    """None where it is not said."""
    over_lora: dict[str, float]
    """Throughput over that of LoRA, by arm."""


TABLE = (
    Published("llama-3.1-70b", "4 H100, tensor parallel", {"direftp": 1.90, "lorap": 1.87}),
    Published("llama-3.1-8b", None, {"direftp": 2.21, "lorap": 1.83}),
    Published("qwen2.5-0.5b", None, {"direftp": 2.39, "lorap": 1.63}),
)


def published_for(model: str) -> dict[str, float]:
    """What is published for a model (`random:llama-3.1-8b`, `meta-llama/Llama-3.1-8B-Instruct`): over LoRA, by arm."""
    name = model.removeprefix("random:").rstrip("/").rpartition("/")[2].lower()
    return next((row.over_lora for row in TABLE if row.model in name), {})
