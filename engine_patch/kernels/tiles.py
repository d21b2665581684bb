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

FEWEST_ROWS = 16
"""Tokens in a block of a small step."""

TALL_FROM_RANK = 32
"""From this rank on blocks are taller: then reading B again for each block costs more than what lower blocks hide."""

RANK_UNIT = 16
"""What shrink computes is stored in so many ranks at a time, zeros from an adapter's rank on."""

WIDEST_ACCESS = 16
"""Elements; knowing that columns are divisible by more would not make any access wider."""

LARGEST_RANK_TILE = 64
SHRINK_PROGRAMS, EXPAND_PROGRAMS = 384, 1056
"""So many keep a large GPU busy: to have them shrink shares out its sums; with more, expand gives each program several tiles."""
MOST_SPLITS, LONGEST_RUN = 8, 8
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
        shrink_warps, expand_warps: of a program.
        shrink_stages, expand_stages: tiles that are loaded ahead.
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


def block_rows(num_tokens: int, max_rank: int, is_invariant: bool = False) -> int:
    """Tokens in a block of a step. It never falls with `num_tokens`, so the padded step of a graph has no lower tiles."""
    if num_tokens <= SMALL_STEP and not is_invariant:
        return FEWEST_ROWS
    return 64 if max_rank >= TALL_FROM_RANK else 32


def most_blocks(num_tokens: int, num_adapters: int, max_rank: int, is_invariant: bool = False) -> int:
    """No step of so many tokens, some of which may be padding, has more blocks, however they are spread over adapters."""
    small, rows = min(num_tokens, SMALL_STEP), block_rows(num_tokens, max_rank, is_invariant)
    return max(num_tokens // rows, small // block_rows(small, max_rank, is_invariant)) + min(
        num_tokens, num_adapters + 1
    )


def choose_run(max_width: int, tile: int, programs: int) -> tuple[int, int]:
    """Among how many programs to share the columns of a block, and how many tiles each of them then computes.

    Args:
        max_width: columns of the widest slice.
        tile: columns of a tile.
        programs: blocks times slices.
    """
    tiles = -(-max_width // tile)
    run = max(1, min(LONGEST_RUN, tiles, programs * tiles // EXPAND_PROGRAMS))
    return -(-tiles // run), run


def choose_splits(programs: int, in_features: int) -> int:
    """Among how many programs each of `programs` shares its sum."""
    splits = 1
    while splits < MOST_SPLITS and programs * splits < SHRINK_PROGRAMS and in_features >= 2 * splits * LEAST_SPLIT:
        splits *= 2
    return splits


def choose_tiles(rows: int, max_rank: int, is_float32: bool) -> Tiles:
    """Of blocks of `rows` tokens, as measured on an H200. An engine has two, since Triton compiles the kernels for each."""
    rank = min(LARGEST_RANK_TILE, max(16, power_of_two(max_rank)))
    if is_float32:  # without tensor cores; operands are held in registers
        return Tiles(rows, min(32, rank), 32, 64, 4, 2, 4, 1)
    if rows == FEWEST_ROWS:
        return Tiles(rows, rank, 128, 128, 4, 3, 4, 2)
    return Tiles(rows, rank, 64, 128, 4, 4, 8, 3)
