"""The folders of a sweep: what lies there, and whether it may be written to."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from preft_cli.errors import UserError
from preft_cli.training.output import RunFolder
from preft_cli.training.sweep.grid import Cell, Grid

State = Literal["new", "finished", "interrupted"]


def folder_of(cell: Cell, root: Path) -> RunFolder:
    """Where everything of the cell lies."""
    return RunFolder((root / cell.config.output_dir).absolute())


def summary_path(grid: Grid, root: Path) -> Path:
    """The sweep's `sweep.json`; the table and the picture lie beside it."""
    return (root / grid.config.output_dir).absolute() / "sweep.json"


def state_of(cell: Cell, root: Path) -> State:
    """What became of the cell's run so far.

    Raises:
        UserError: its resolved config is damaged.
    """
    folder = folder_of(cell, root)
    if not folder.in_use():
        return "new"
    return "finished" if folder.is_finished(cell.config) else "interrupted"


def check_folders(grid: Grid, root: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse what would mix two sweeps or destroy something; nothing is changed.

    Raises:
        UserError: folders are in use and neither `resume` nor `overwrite` is given, or they hold something else.
    """
    summary = summary_path(grid, root)
    output = summary.parent
    if output.exists() and not output.is_dir():
        raise UserError(f"train.output_dir: {output} is a file; name a folder")
    if RunFolder(output).config.exists():
        raise UserError(
            f"train.output_dir: {output} holds a single run of preft train, and a sweep's runs lie in folders below. "
            "Name another train.output_dir or adapter.name."
        )
    if not resume and not overwrite:
        used = [cell.name for cell in grid.cells if folder_of(cell, root).in_use()]
        if used or summary.exists():
            found = f"{len(used)} of the {len(grid.cells)} runs, such as {used[0]}" if used else summary.name
            raise UserError(
                f"train.output_dir: {output} holds a sweep already ({found}). Give --resume to keep what is finished and "
                "do the rest, --overwrite to start anew, or another adapter.name or train.output_dir."
            )
    problems = []
    for cell in grid.cells:
        try:
            folder_of(cell, root).check(cell.config, resume=resume, overwrite=overwrite)
        except UserError as problem:
            problems.append(str(problem))
    if problems:
        more = f"\nThe same goes for {len(problems) - 1} more of this sweep's folders." if len(problems) > 1 else ""
        raise UserError(problems[0] + more)


def clear(grid: Grid, root: Path) -> None:
    """Take away what earlier runs left, of all cells at once: or a later --resume would mix two sweeps."""
    for path in (summary_path(grid, root).with_suffix(suffix) for suffix in (".json", ".csv", ".png")):
        path.unlink(missing_ok=True)
    for folder, config in ((folder_of(cell, root), cell.config) for cell in grid.cells):
        if folder.path.exists():
            folder.log.unlink(missing_ok=True)
            folder.prepare(config, resume=False)
