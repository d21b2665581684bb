"""Runs a grid: checks all of it, then trains what is left to train, and keeps the summary up to date after each run."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from preft_cli.bench.machine import commit, hardware, versions
from preft_cli.bench.results import write_json
from preft_cli.console import duration, progress, say, warn
from preft_cli.convert.workers import cores
from preft_cli.errors import UserError
from preft_cli.threads import wait_politely
from preft_cli.training.interrupt import InterruptedRunError, InterruptRequest
from preft_cli.training.plan import setting_problems
from preft_cli.training.sweep.cell import Preparer, done, run_cell
from preft_cli.training.sweep.folders import check_folders, clear, folder_of, state_of, summary_path
from preft_cli.training.sweep.grid import Cell, Grid
from preft_cli.training.sweep.notes import comparable, notes_of
from preft_cli.training.sweep.plan import jobs_problem
from preft_cli.training.sweep.result import CellResult, SweepResult
from preft_cli.training.sweep.summary import points_of
from preft_cli.training.sweep.workers import run_in_processes


def run_sweep(
    grid: Grid, root: Path, *, resume: bool = False, overwrite: bool = False, jobs: int = 1, command: str = ""
) -> SweepResult:
    """Train every cell of `grid`; one that fails is recorded, and the others go on. Writes `sweep.json` after each.

    Args:
        grid: from `parse_grid`.
        root: where relative paths of the config start.
        resume: keep the cells that are finished and go on with those that were interrupted.
        overwrite: discard what lies in the cells' folders.
        jobs: processes that share the cells.
        command: recorded in the result.

    Raises:
        UserError: anything that would stop a cell at once, before the first one runs; or Ctrl-C, after saving checkpoints.
    """
    # As in `train`: Hugging Face's libraries and OpenMP read these when they are first loaded.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    wait_politely()
    if refused := jobs_problem(grid, jobs):
        raise UserError(refused, 2)
    check_folders(grid, root, resume=resume, overwrite=overwrite)
    finished = [cell for cell in grid.cells if resume and state_of(cell, root) == "finished"]
    found = {cell.name: done(cell, folder_of(cell, root).read_result(), root) for cell in finished}
    left = [cell for cell in grid.cells if cell.name not in found]
    prepare = Preparer(root)
    check_cells(left, prepare)
    if overwrite:
        clear(grid, root)
    summary = _Summary(grid, root, command, jobs)
    if found:
        say(f"{len(found)} of {len(grid.cells)} runs are finished already")
    try:
        with closing(_run(left, root, prepare, jobs, resume)) as results:
            for result in results:
                found[result.name] = result
                summary.write(found)
    except InterruptedRunError as stop:
        raise UserError(
            f"stopped; {len(found)} of {len(grid.cells)} runs are done; those that had begun to train have saved a checkpoint. "
            "The same command with --resume goes on."
        ) from stop
    return summary.write(found)


def check_cells(cells: Sequence[Cell], prepare: Preparer) -> None:
    """Refuse every cell that could not start; data are read once for all that share them.

    Raises:
        UserError: with the first cell of each kind of problem.
    """
    problems: dict[str, str] = {}
    for cell in cells:
        try:
            if found := setting_problems(cell.config):
                raise UserError("\n".join(found))
            prepare(cell.config)
        except UserError as bad:
            problems.setdefault(str(bad), cell.name)
    if problems:
        raise UserError("\n".join(f"{name}: {problem}" for problem, name in problems.items()), exit_code=2)


def _run(cells: Sequence[Cell], root: Path, prepare: Preparer, jobs: int, resume: bool) -> Generator[CellResult]:
    """What becomes of each cell, as they end."""
    if jobs > 1 and len(cells) > 1:
        yield from _run_side_by_side(cells, root, min(jobs, len(cells)), resume)
        return
    started = time.monotonic()
    for number, cell in enumerate(cells, start=1):
        spent = time.monotonic() - started
        left = f", about {duration(spent / (number - 1) * (len(cells) - number + 1))} left" if number > 1 else ""
        say(f"sweep: run {number} of {len(cells)}{left}: {cell.name}")
        result = run_cell(cell, root, prepare, resume=resume)
        if result.error:
            warn(f"{cell.name}: {result.error}")
        yield result


def _run_side_by_side(cells: Sequence[Cell], root: Path, jobs: int, resume: bool) -> Generator[CellResult]:
    ended = 0
    with InterruptRequest() as stop, progress("sweep", total=len(cells), unit="runs") as bar:
        for result in run_in_processes(cells, root, environments(jobs, _gpus(), cores()), stop, resume=resume):
            ended += 1
            bar.update(ended, note=f"{result.name}: {_told(result)}")
            if result.error:
                warn(f"{result.name}: {result.error}")
            yield result
        if stop.requested:
            raise InterruptedRunError
        if ended < len(cells):
            raise UserError("no worker process could be started; see above, or use --jobs 1")


def _told(result: CellResult) -> str:
    if result.held_out is None:
        return "failed"
    measure = result.held_out.measure
    return f"{measure.held_out} {measure.text(result.held_out.adapter_value)}"


def environments(jobs: int, gpus: Sequence[str], num_cores: int) -> list[dict[str, str]]:
    """For each worker its share of the threads, and with several GPUs the one that it computes on, in turn."""
    threads = {"OMP_NUM_THREADS": str(max(1, num_cores // jobs))}
    pinned = [{"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if len(gpus) > 1 else {} for number in range(jobs)]
    return [threads | one for one in pinned]


def _gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES would call each GPU that this process may use."""
    import torch

    count = torch.cuda.device_count()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[:count] or [str(number) for number in range(count)]


class _Summary:
    """`sweep.json`, written anew after each run."""

    def __init__(self, grid: Grid, root: Path, command: str, jobs: int) -> None:
        self._grid = grid
        self._path = summary_path(grid, root)
        self._started = time.monotonic()
        self._about = {
            "created": datetime.now(UTC),
            "command": command,
            "base_model": grid.config.model.base,
            "measure": grid.measure.name,
            "swept": grid.swept,
            "choose": list(grid.choose),
            "config": grid.config.model_dump(mode="json"),
            "versions": versions() | {name: metadata.version(name) for name in ("peft", "accelerate")},
            "hardware": hardware(),
            "git_commit": commit(),
            "jobs": jobs,
        }

    def write(self, found: dict[str, CellResult]) -> SweepResult:
        """Sum up what has been found so far."""
        cells = comparable([found[cell.name] for cell in self._grid.cells if cell.name in found])
        result = SweepResult.model_validate(
            {
                **self._about,
                "cells": cells,
                "points": points_of(self._grid, cells),
                "base": next((cell.held_out.base_value for cell in cells if cell.held_out), None),
                "complete": len(cells) == len(self._grid.cells),
                "notes": notes_of(cells),
                "seconds": round(time.monotonic() - self._started, 1),
            }
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(result, self._path)
        return result
