"""Launches of a Triton kernel that cost the host little.

`kernel[grid](...)` works out at every launch which compiled variant its arguments need, which takes longer than everything else
that Python does for a launch. A layer's arguments need the same variant in every step, so it is looked up by the few
things that Triton specialises on.
"""

from __future__ import annotations

from typing import Any

import torch


class Launcher:
    """One kernel, and the variants of it that were compiled so far. One process has one device."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], **options: int
    ) -> None:
        """Queue the kernel.

        Args:
            grid: its programs, in up to three dimensions.
            arguments: what precedes the constants, in order.
            constants: by name, in order.
            options: Triton's `num_warps` and `num_stages`.
        """
        key = (*map(_variant, arguments), *constants.values(), *options.values())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants.values())
            return
        compiled = self._kernel[grid](*arguments, **constants, **options)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[key] = compiled


def _variant(argument: Any) -> Any:
    """At least as fine as what Triton tells apart: of a number whether it is 1, divisible by 16, or beyond 32 bits."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 2**31
    return argument
