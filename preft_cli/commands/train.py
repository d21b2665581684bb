"""`preft train`: from conversations to an adapter, or to a grid of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import typer

from preft_cli.commands.options import Config, DryRun, Json, Set, load_config
from preft_cli.commands.train_options import Choose, Jobs, Out, Overwrite, Resume, Sweep

if TYPE_CHECKING:
    from preft_cli.rl.result import RlResult
    from preft_cli.training.result import TrainResult


def command(
    config: Config = None,
    sets: Set = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    sweep: Sweep = None,
    choose: Choose = None,
    jobs: Jobs = 1,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train an adapter on the conversations of train.file.

    The adapter ends up in OUTPUT_DIR/adapter, where OUTPUT_DIR is train.output_dir (default: runs/<adapter.name>).
    Ctrl-C keeps the last checkpoint; --resume goes on from it.

    With --sweep: a run for each value, in a folder of its own below OUTPUT_DIR, and a table and a picture of all.
    """
    from preft_cli.commands.output import needs_extras, print_json, quiet_stdout
    from preft_cli.errors import UserError
    from preft_cli.training.processes import is_main

    if resume and overwrite:
        raise UserError("--resume goes on with an earlier run and --overwrite discards it: give one of them", 2)
    loaded = load_config(config, sets, required=True)
    if sweep:
        from preft_cli.commands.train_sweep import train_sweep

        train_sweep(sweep, choose or [], loaded, resume, overwrite, jobs, out, dry_run=dry_run, as_json=as_json)
        return
    if alone := [name for name, given in (("--choose", choose), ("--jobs", jobs > 1), ("--out", out)) if given]:
        raise UserError(f"{alone[0]} is an option of a sweep: give --sweep too", 2)
    with needs_extras("train"), quiet_stdout(dry_run or as_json):
        if dry_run:
            from preft_cli.training.plan import plan_train

            plan = plan_train(loaded.config, loaded.root)
        else:
            from preft_cli.training.run import train

            result = train(loaded.config, loaded.root, resume=resume, overwrite=overwrite)
    if not is_main():
        return  # one of several processes that torchrun started; the main one prints
    if dry_run:
        print_json(plan)
        if plan.problems:
            raise typer.Exit(2)
    elif as_json:
        print_json(result)
    elif loaded.config.train.task == "grpo":
        from preft_cli.rl.report import print_result as print_rl_result

        print_rl_result(cast("RlResult", result))
    else:
        from preft_cli.training.report import print_result

        print_result(cast("TrainResult", result))
