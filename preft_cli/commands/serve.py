"""`preft serve`: an OpenAI-compatible server for a folder of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft_cli.commands.options import Config, DryRun, Json, Set, flag, load_config


def command(
    config: Config = None,
    sets: Set = None,
    adapters: Annotated[
        Path | None,
        typer.Option(
            "--adapters",
            metavar="DIR",
            help="Folder of adapters: a store, trained adapters, PEFT adapters, or a mixture.",
            show_default="serve.adapters, else convert.store",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host", metavar="HOST", help="Address to listen on.", show_default="serve.host: this machine only"
        ),
    ] = None,
    port: Annotated[
        str | None, typer.Option("--port", metavar="PORT", help="Port to listen on.", show_default="serve.port: 8000")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Serve a folder of adapters through the OpenAI API.

    The base model is served too.
    Each adapter is a model name of its own: ask for it with "model": "NAME". Ctrl-C stops the server.
    """
    from preft_cli.commands.output import needs_extras, print_json, quiet_stdout

    loaded = load_config(
        config,
        sets,
        *flag("--adapters", "serve.adapters", adapters),
        *flag("--host", "serve.host", host),
        *flag("--port", "serve.port", port),
    )
    with needs_extras("serve"), quiet_stdout():
        from preft_cli.serving.plan import plan_serve

        plan = plan_serve(loaded.config, loaded.root)
    if dry_run or as_json:
        print_json(plan.describe())
    if dry_run:
        return
    with needs_extras("serve"), quiet_stdout(as_json):
        from preft_cli.serving.launch import serve

        code = serve(plan)
    raise typer.Exit(code)
