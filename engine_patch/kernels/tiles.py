"""How the GPU kernels cut their work into tiles. Nothing here needs a GPU.

A prefill step is bound by the memory traffic of x and y, so its tiles are tall. A step of few tokens is bound by the reads
of the adapters, each of which has a token or some; its tiles are as low as tensor cores allow, and each sum over
`in_features` is shared out among several programs, which would otherwise be too few to keep a GPU busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

SMALL_STEP = 512
"""Steps of at most so many tokens get low tiles: those that vLLM replays as CUDA graphs."""

FEWEST_ROWS, MOST_ROWS = 16, 64
"""Tokens in a block."""

RANK_UNIT = 16
"""What shrink computes is stored in so many ranks at a time, zeros from an adapter's rank on."""

WIDEST_ACCESS = 16
"""Elements; knowing that columns are divisible by more would not make any access wider."""

LARGEST_RANK_TILE = 64
PROGRAMS = 1024
"""Shrink shares out its sums until it has so many programs: some for each multiprocessor of a large GPU."""
MOST_SPLITS = 8
LEAST_SPLIT = 256
"""Splitting a sum into parts shorter than this costs more than it brings."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of the kernels' tiles, in elements; all are powers of two.

    Attributes:
        rows: tokens in a tile, at least as many as in any block of the step.
        rank: ranks in a tile; larger ranks are looped over.
        depth: elements of `in_features` that shrink multiplies at once.
        width: output columns in a tile of expand.
        shrink_warps, shrink_stages, expand_warps, expand_stages: Triton's launch options.
    """

    rows: int
    rank: int
    depth: int
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


def block_rows(num_tokens: int, is_invariant: bool = False) -> int:
    """Tokens in a block of a step. It never falls with `num_tokens`, so the padded step of a graph has no lower tiles."""
    return MOST_ROWS if is_invariant or num_tokens > SMALL_STEP else FEWEST_ROWS


def most_blocks(num_tokens: int, num_adapters: int) -> int:
    """No step of so many tokens, some of which may be padding, has more blocks, however they are spread over adapters."""
    whole = max(num_tokens // block_rows(num_tokens), min(num_tokens, SMALL_STEP) // FEWEST_ROWS)
    return whole + min(num_tokens, num_adapters + 1)


def choose_splits(num_tokens: int, in_features: int, n_slices: int, is_invariant: bool = False) -> int:
    """Among how many programs to share a sum over `in_features`.

    With `is_invariant` (vLLM's batch invariance) none is shared, so that a token's result does not depend on its company.
    """
    if is_invariant:
        return 1
    programs = max(1, num_tokens // block_rows(num_tokens)) * n_slices
    splits = 1
    while splits < MOST_SPLITS and programs * splits < PROGRAMS and in_features >= 2 * splits * LEAST_SPLIT:
        splits *= 2
    return splits


def choose_tiles(num_tokens: int, max_rank: int, is_float32: bool, is_invariant: bool = False) -> Tiles:
    """The tiles for a step of `num_tokens` tokens, all of them with their padding.

    There are two different answers for an engine, since Triton compiles the kernels for each; with `is_invariant` there is one.
    """
    return _tiles(block_rows(num_tokens, is_invariant), max_rank, is_float32)


@lru_cache
def _tiles(rows: int, max_rank: int, is_float32: bool) -> Tiles:
    rank = min(LARGEST_RANK_TILE, max(16, power_of_two(max_rank)))
    if is_float32:  # without tensor cores; operands are held in registers
        return Tiles(rows, min(32, rank), 32, 64, 4, 2, 4, 2)
    if rows > FEWEST_ROWS:
        return Tiles(rows, rank, 64, 128, 4, 4, 8, 2)
    return Tiles(rows, rank, 128, 128, 4, 3, 4, 2)
