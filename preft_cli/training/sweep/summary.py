"""From what cells measured to the points of the picture: means over seeds, and the choice by validation loss."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from preft_cli.training.sweep.grid import METHOD, RANK, SEED, Axis, Grid
from preft_cli.training.sweep.names import short_names, value_text
from preft_cli.training.sweep.result import Candidate, CellResult, OverSeeds, Point


def points_of(grid: Grid, cells: Sequence[CellResult]) -> list[Point]:
    """One point for each combination of the values that are neither seeds nor chosen, in the grid's order.

    A candidate counts in the choice when all of its seeds have a validation loss. The chosen one's held-out loss is all
    that is reported: the lowest of several held-out losses would look better than it is.
    """
    chosen_keys = [key for name in grid.choose for key in name.split(":")]
    own = [key for axis in grid.axes for key in axis.keys if key != SEED and key not in chosen_keys]
    tried = {key: [cell.settings[key] for cell in grid.cells] for key in chosen_keys}
    seeds = len({cell.config.project.seed for cell in grid.cells})
    return [_point(grid, group, own, chosen_keys, tried, seeds) for group in _groups(cells, own)]


def cells_of(point: Point, cells: Iterable[CellResult]) -> list[CellResult]:
    """The cells that a point is the mean of."""
    wanted = point.settings | point.chosen
    return [cell for cell in cells if all(cell.settings[key] == value for key, value in wanted.items())]


def _groups(cells: Iterable[CellResult], keys: Sequence[str]) -> list[list[CellResult]]:
    """The cells with the same values of `keys` together."""
    groups: dict[str, list[CellResult]] = {}
    for cell in cells:
        groups.setdefault(json.dumps([cell.settings[key] for key in keys]), []).append(cell)
    return list(groups.values())


def _point(
    grid: Grid,
    cells: list[CellResult],
    own: Sequence[str],
    chosen_keys: Sequence[str],
    tried: Mapping[str, Sequence[Any]],
    seeds: int,
) -> Point:
    groups = _groups(cells, chosen_keys)
    candidates = [_candidate(group, chosen_keys, seeds) for group in groups] if chosen_keys else []
    if chosen_keys:
        losses = [candidate.validation for candidate in candidates]
        able = [(loss.mean, at) for at, loss in enumerate(losses) if loss is not None]
        kept = groups[min(able)[1]] if able else []
    else:
        kept = cells
    chosen = {key: kept[0].settings[key] for key in chosen_keys} if kept else {}
    measured = {cell.seed: cell.held_out.adapter_value for cell in kept if cell.held_out}
    shown = kept[0] if kept else cells[0]
    return Point(
        line=line_name(grid, shown),
        settings={key: cells[0].settings[key] for key in own},
        method=shown.method,
        rank=shown.rank,
        trainable_parameters=next((cell.trainable_parameters for cell in kept if cell.trainable_parameters), None),
        held_out=OverSeeds.of(measured) if measured else None,
        chosen=chosen,
        at_edge=[key for key, value in chosen.items() if at_edge(value, tried[key])],
        candidates=candidates,
        failed=[cell.name for cell in cells if cell.error is not None],
    )


def _candidate(cells: Sequence[CellResult], keys: Sequence[str], seeds: int) -> Candidate:
    measured = {cell.seed: cell.validation.adapter for cell in cells if cell.validation}
    complete = len(measured) == seeds
    return Candidate(
        settings={key: cells[0].settings[key] for key in keys}, validation=OverSeeds.of(measured) if complete else None
    )


def at_edge(value: Any, tried: Iterable[Any]) -> bool:
    """Whether a better value may lie beyond those tried. Values that are no numbers have no order, hence no edge."""
    numbers = {float(one) for one in tried if isinstance(one, int | float) and not isinstance(one, bool)}
    if isinstance(value, bool) or not isinstance(value, int | float) or not numbers:
        return False
    return float(value) in (min(numbers), max(numbers))


def line_name(grid: Grid, cell: CellResult) -> str:
    """What a cell is drawn with: its method, and the values of further keys that have no axis in the picture.

    Keys that move with the rank or the method are told by it.
    """
    axes = [axis for axis in grid.axes if axis.name not in grid.choose and not _is_told(axis)]
    further = [key for axis in axes for key in axis.keys if key not in (SEED, METHOD)]
    short = short_names(key for axis in grid.axes for key in axis.keys)
    method = "best method" if any(METHOD in name.split(":") for name in grid.choose) else cell.method
    return ", ".join([method, *(f"{short[key]} {value_text(cell.settings[key])}" for key in further)])


def _is_told(axis: Axis) -> bool:
    """Whether the rank or the method alone tells where on the axis a cell is."""
    told = [at for at, key in enumerate(axis.keys) if key in (RANK, METHOD)]
    return bool(told) and len({tuple(point[at] for at in told) for point in axis.points}) == len(axis.points)
