"""`preft train`: from conversations to an adapter."""

from __future__ import annotations

from typing import Annotated

import typer

from preft_cli.commands.options import Config, DryRun, Json, Set, load_config


def command(
    config: Config = None,
    sets: Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the output folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier run left in the output folder.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train an adapter on the conversations of train.file.

    The adapter ends up in OUTPUT_DIR/adapter, where OUTPUT_DIR is train.output_dir (default: runs/<adapter.name>).
    Ctrl-C keeps the last checkpoint; --resume goes on from it.
    """
    from preft_cli.commands.output import needs_extras, print_json, quiet_stdout
    from preft_cli.errors import UserError
    from preft_cli.training.processes import is_main

    if resume and overwrite:
        raise UserError("--resume goes on with an earlier run and --overwrite discards it: give one of them", 2)
    loaded = load_config(config, sets, required=True)
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
    else:
        from preft_cli.training.report import print_result

        print_result(result)
