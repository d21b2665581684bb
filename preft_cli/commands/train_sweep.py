"""`preft train --sweep`: the grid, its table and its picture."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer

from preft_cli.commands.output import needs_extras, print_json, quiet_stdout
from preft_cli.config.load import Loaded
from preft_cli.errors import UserError
from preft_cli.training import processes
from preft_cli.training.sweep.grid import parse_grid


def train_sweep(
    sweeps: list[str],
    choose: list[str],
    loaded: Loaded,
    resume: bool,
    overwrite: bool,
    jobs: int,
    out: Path | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run the grid, or show its plan. Exit code 1 if a run has failed."""
    if processes.world_size() > 1:
        raise UserError(
            "--sweep: this is one of several processes that torchrun or `accelerate launch` started, and each would run the "
            "grid. Start it with `preft train --sweep` alone; for several processes a run set train.num_processes",
            2,
        )
    grid = parse_grid(sweeps, choose, loaded.config)
    if out is not None:
        check_out(out)
    if dry_run:
        from preft_cli.training.sweep.plan import plan_sweep

        plan = plan_sweep(grid, loaded.root, resume=resume, overwrite=overwrite, jobs=jobs)
        print_json(plan)
        if plan.problems:
            raise typer.Exit(2)
        return
    from preft_cli.training.sweep.folders import summary_path
    from preft_cli.training.sweep.report import print_sweep, write_files
    from preft_cli.training.sweep.run import run_sweep

    command = shlex.join(["preft", *sys.argv[1:]])
    with needs_extras("train"), quiet_stdout(as_json):
        result = run_sweep(grid, loaded.root, resume=resume, overwrite=overwrite, jobs=jobs, command=command)
        for path in [summary_path(grid, loaded.root), *([out.absolute()] if out else [])]:
            write_files(result, path)
    if as_json:
        print_json(result)
    else:
        print_sweep(result)
    if result.failed:
        raise typer.Exit(1)


def check_out(out: Path) -> None:
    """Refuse early what could not be written when hours of training have passed.

    Raises:
        UserError: it is no .json file, or its folder cannot be made.
    """
    if out.suffix != ".json":
        raise UserError(f"--out {out}: expected the name of a .json file; the picture gets its name with .png", 2)
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name a .json file", 2)
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"--out {out} cannot be written: {problem.strerror or problem}", 2) from None
