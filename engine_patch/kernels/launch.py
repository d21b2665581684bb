"""Launches of a Triton kernel that cost the host little.

`kernel[grid](...)` works out at every launch which compiled variant its arguments need, which takes longer than everything else
that Python does for a launch. Here the caller names the variant.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class Launcher:
    """One kernel, and the variants of it that were compiled so far. One process has one device."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        variant: Hashable,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        """Queue the kernel.

        Args:
            grid: its programs.
            variant: equal only where Triton specialises on equal things: dtypes, whether pointers are aligned, numbers that it
                is not told to leave alone, and constants.
            arguments: what precedes the constants, in order.
            constants: in order.
            warps: of a program.
        """
        compiled = self._compiled.get(variant)
        if compiled is not None:
            compiled[grid](*arguments, *constants)
            return
        compiled = self._kernel[grid](*arguments, *constants, num_warps=warps)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[variant] = compiled
