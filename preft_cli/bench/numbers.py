"""Measured numbers as people read them, and ratios whichever way round they were kept."""

from __future__ import annotations

from preft_cli.bench.results import Spread


def number(value: float) -> str:
    """Three digits or more: `0.87`, `12.3`, `4512`."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def spread(value: Spread | None) -> str:
    """`1.23 (1.20-1.31)`, or a dash where nothing was measured."""
    return "-" if value is None else f"{number(value.median)} ({number(value.low)}-{number(value.high)})"


def tokens(length: int | list[int]) -> str:
    """A length of the config: `64`, or `8-512` where it is drawn from a range."""
    return "-".join(map(str, length)) if isinstance(length, list) else str(length)


def ratio(ratios: dict[str, Spread], over: str, under: str) -> Spread | None:
    """Speed of `over` over that of `under`; None if it was not measured.

    A result has no ratio of the base arm to others. It is the inverse of theirs: low and high change places.
    """
    if (kept := ratios.get(f"{over}/{under}")) is not None:
        return kept
    kept = ratios.get(f"{under}/{over}")
    if kept is None or kept.low <= 0:
        return None
    return Spread(median=1 / kept.median, low=1 / kept.high, high=1 / kept.low)
