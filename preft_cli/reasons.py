"""Reasons that are shown after the path they are about."""

from __future__ import annotations

from pathlib import Path


def without_path(source: Path | str, reason: str) -> str:
    """`reason` without a leading `source`: the path is said once."""
    return reason.removeprefix(f"{source}: ").removeprefix(f"{source} ")
