"""`preft data`: the data files, before any training."""

from __future__ import annotations

from typing import Annotated

import typer

from preft_cli.commands.options import Config, Json, Set, load_config

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, add_completion=False, help="Look at the data before any training."
)


@app.callback()
def _commands() -> None:
    """Without it, Typer would make `check` the command itself."""


@app.command("check")
def check(
    config: Config = None,
    sets: Set = None,
    rows: Annotated[
        int, typer.Option("--rows", min=0, metavar="N", help="Rows whose prompt ids are compared with the server's.")
    ] = 3,
    row: Annotated[int, typer.Option("--row", min=1, metavar="N", help="The row that is shown token by token.")] = 1,
    as_json: Json = False,
) -> None:
    """Show what training will see: counts, lengths, dropped and repeated rows, one row with its mask, the server's ids.

    Loads no weights. The exit code is 1 if the ids of a prompt are not those that the server computes.
    """
    from preft_cli.commands.output import needs_extras, print_json, quiet_stdout

    loaded = load_config(config, sets, required=True)
    with needs_extras("data check"), quiet_stdout():
        from preft_cli.data.check import check as check_data

        result = check_data(loaded.config, loaded.root, rows, row)
    if as_json:
        print_json(result)
    else:
        from preft_cli.data.check.report import print_check

        print_check(result)
    if not result.server.equal:
        raise typer.Exit(1)
