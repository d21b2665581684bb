"""The whole idea in one place: position i of a request is adapted if and only if i < n, its number of prompt tokens.

n is fixed when the request is admitted. Training, the engine's runners and its prefix cache all ask here, so that none of
them can mean something else (arXiv 2605.14217). The reference of the tests does not, so that it notices a fault made here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PREFILL_ONLY_METHODS = frozenset({"lorap", "direftp", "lorap+direftp"})
ALL_TOKEN_METHODS = frozenset({"lora", "direft", "lora+direft"})
METHODS = PREFILL_ONLY_METHODS | ALL_TOKEN_METHODS
"""An adapter with both parts has one rule for both."""

Positions = TypeVar("Positions", int, "npt.NDArray[np.int64]")


def is_prefill_only(method: str) -> bool:
    """Whether `method` adapts prompt positions only.

    Raises:
        ValueError: for a method that does not exist: a typing mistake must not turn into "all tokens".
    """
    if method not in METHODS:
        raise ValueError(f"unknown adapter method {method!r}; known: {', '.join(sorted(METHODS))}")
    return method in PREFILL_ONLY_METHODS


def parts(method: str) -> frozenset[str]:
    """What an adapter of `method` is made of: `lora`, `direft`, or both."""
    return frozenset(part.removesuffix("p") for part in method.split("+"))


def num_adapted(num_prompt_tokens: Positions, start: Positions, count: Positions) -> Positions:
    """How many of the positions `start .. start + count - 1` are adapted; they are always the first ones.

    Works on integers and, element by element, on arrays `[num_requests]`.
    """
    if isinstance(start, int) and isinstance(
        count, int
    ):  # NumPy takes 40 us for one number, and every block of KV cache asks
        return max(0, min(num_prompt_tokens - start, count))
    import numpy as np  # here, since the methods' names are read by commands that start without it

    adapted: Positions = np.clip(num_prompt_tokens - start, 0, count)
    return adapted
