"""What `preft train --sweep --dry-run` shows: the cells, known without torch or a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from preft_cli.errors import UserError
from preft_cli.training.plan import TrainPlan, plan_train, setting_problems
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


STEPS_HANG_ON = {"epochs", "max_steps", "batch_size", "gradient_accumulation_steps", "num_processes", "packing"}


def jobs_problem(grid: Grid, jobs: int) -> str | None:
    """Why the cells cannot run side by side."""
    if jobs == 1:
        return None
    if any(cell.config.train.num_processes > 1 for cell in grid.cells):
        return "--jobs runs cells side by side, and train.num_processes gives one cell several: use one of them"
    train, share = grid.config.train, grid.config.serve.gpu_memory_utilization
    if train.task == "grpo" and train.grpo.rollout_url:
        return (
            f"--jobs {jobs}: the server of train.grpo.rollout_url knows the weights of all runs by one name (adapter.name), so "
            "runs side by side would sample from each other's; leave --jobs out"
        )
    if train.task == "grpo" and share is None:
        return (
            f"--jobs {jobs}: each run has an engine of its own, and each would take most of the device's memory. Set "
            f"serve.gpu_memory_utilization to the share of an engine, such as {0.6 / jobs:.1g} for {jobs} runs on one device "
            "(training needs some too)"
        )
    return None


def new_problems(grid: Grid, known: set[str]) -> list[str]:
    """Settings that no run can do as they say, beside those `known`, with the first cell that has them."""
    first = {problem: cell.name for cell in reversed(grid.cells) for problem in setting_problems(cell.config)}
    return [f"{name}: {problem}" for problem, name in first.items() if problem not in known]


def plan_sweep(grid: Grid, root: Path, *, resume: bool, overwrite: bool, jobs: int) -> SweepPlan:
    """The plan of `grid`; reads the data files, writes nothing."""
    plans: dict[str, TrainPlan] = {}
    cells: list[PlannedCell] = []
    for cell in grid.cells:
        # The files are read once for all cells of as many steps.
        key = f"{rows_key(cell.config)} {cell.config.train.model_dump(include=STEPS_HANG_ON)}"
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
    problems += new_problems(grid, set(problems))
    if refused := jobs_problem(grid, jobs):
        problems.append(refused)
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
