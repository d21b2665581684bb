"""What `preft train --sweep --dry-run` shows: the cells, known without torch or a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from preft_cli.errors import UserError
from preft_cli.training.plan import TrainPlan, plan_train
from preft_cli.training.sweep.cell import rows_key
from preft_cli.training.sweep.folders import check_folders, folder_of, state_of
from preft_cli.training.sweep.grid import Cell, Grid


class PlannedCell(BaseModel):
    """One run."""

    model_config = ConfigDict(frozen=True)

    name: str
    settings: dict[str, Any]
    output_dir: Path
    state: str = Field(description="new, finished, interrupted, or why its folder cannot be used.")
    steps: int | None


class SweepPlan(BaseModel):
    """The resolved sweep."""

    model_config = ConfigDict(frozen=True)

    swept: dict[str, list[Any]]
    choose: list[str]
    jobs: int
    cells: list[PlannedCell]
    first: TrainPlan = Field(description="The first run in full.")
    problems: list[str] = Field(description="What would stop the sweep at once.")


def plan_sweep(grid: Grid, root: Path, *, resume: bool, overwrite: bool, jobs: int) -> SweepPlan:
    """The plan of `grid`; reads the data files, writes nothing."""
    plans: dict[str, TrainPlan] = {}
    cells: list[PlannedCell] = []
    for cell in grid.cells:
        # What the number of steps hangs on; the files are read once for each.
        key = f"{rows_key(cell.config)} {cell.config.train.epochs} {cell.config.train.max_steps}"
        plan = plans[key] = plans.get(key) or plan_train(cell.config, root)
        output_dir = folder_of(cell, root).path
        cells.append(
            PlannedCell(
                name=cell.name,
                settings=cell.settings,
                output_dir=output_dir,
                state=_state(cell, root),
                steps=plan.steps,
            )
        )
    problems = [problem for plan in plans.values() for problem in plan.problems]
    try:
        check_folders(grid, root, resume=resume, overwrite=overwrite)
    except UserError as refused:
        problems.append(str(refused))
    return SweepPlan(
        swept=grid.swept,
        choose=list(grid.choose),
        jobs=jobs,
        cells=cells,
        first=next(iter(plans.values())),
        problems=list(dict.fromkeys(problems)),
    )


def _state(cell: Cell, root: Path) -> str:
    try:
        return state_of(cell, root)
    except UserError as damaged:
        return str(damaged)
