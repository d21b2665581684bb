"""How the GPU kernels cut their work into tiles. Nothing here needs a GPU.

A prefill step is bound by the memory traffic of x and y, so its tiles are tall. A step of few tokens is bound by the reads
of the adapters, each of which has a token or some; its tiles are as low as tensor cores allow, and each sum over
`in_features` is shared out among several programs, which would otherwise be too few to keep a GPU busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SMALL_STEP = 512
"""Steps of at most so many tokens get low tiles: those that vLLM replays as CUDA graphs."""

LARGE_STEP = 4096
"""Steps of so many tokens keep a GPU busy without splitting sums."""

RANK_UNIT = 16
"""What shrink computes is stored in so many ranks at a time, zeros from an adapter's rank on."""

WIDEST_ACCESS = 16
"""Elements; knowing that columns are divisible by more would not make any access wider."""

LARGEST_RANK_TILE = 64
LEAST_SPLIT = 256
"""Splitting a sum into parts shorter than this costs more than it brings."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of both kernels' tiles, in elements; all are powers of two.

    Attributes:
        rows: tokens in a tile.
        rank: ranks in a tile; larger ranks are looped over.
        depth: elements of `in_features` that shrink multiplies at once.
        splits: programs that share one of shrink's sums.
        width: output columns in a tile of expand.
        shrink_warps, shrink_stages, expand_warps, expand_stages: Triton's launch options.
    """

    rows: int
    rank: int
    depth: int
    splits: int
    width: int
    shrink_warps: int
    shrink_stages: int
    expand_warps: int
    expand_stages: int


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << max(0, least - 1).bit_length()


def common_alignment(*widths: int) -> int:
    """A power of two that divides the widths, and so every column at which one of the slices beside one another starts."""
    return math.gcd(WIDEST_ACCESS, *widths)


def choose_splits(num_tokens: int, in_features: int, n_slices: int) -> int:
    """Among how many programs to share a sum over `in_features`."""
    if num_tokens >= LARGE_STEP:
        return 1
    splits = 8 if n_slices == 1 and num_tokens <= SMALL_STEP else 4
    while splits > 1 and in_features < splits * LEAST_SPLIT:
        splits //= 2
    return splits


def choose_tiles(
    num_tokens: int, in_features: int, n_slices: int, max_rank: int, is_float32: bool, is_invariant: bool = False
) -> Tiles:
    """The tiles for a step of `num_tokens` tokens.

    There are few different answers, since Triton compiles the kernels for each. With `is_invariant` (vLLM's batch
    invariance) the number of tokens has no say, so that a token's result does not depend on its company.
    """
    rank = min(LARGEST_RANK_TILE, max(16, power_of_two(max_rank)))
    splits = 1 if is_invariant else choose_splits(num_tokens, in_features, n_slices)
    if is_float32:  # without tensor cores; operands are held in registers
        return Tiles(16, min(32, rank), 32, splits, 64, 4, 2, 4, 2)
    if is_invariant or num_tokens > SMALL_STEP:
        return Tiles(64, rank, 64, splits, 128, 4, 4, 8, 2)
    return Tiles(16, rank, 128, splits, 128, 4, 3, 4, 2)
