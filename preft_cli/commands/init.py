"""`preft init`: a commented preft.yaml to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft_cli.commands.options import Json


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The project's folder; made if it is missing.", show_default=".")
    ] = Path(),
    template: Annotated[
        str, typer.Option("--template", metavar="NAME", help="Which template to start from; --list shows them.")
    ] = "style",
    show_list: Annotated[bool, typer.Option("--list", help="List the templates and stop.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a preft.yaml that is there already.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, as JSON, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Write a commented preft.yaml to start from.

    It is the one file that all commands read; preft never overwrites one that is there, unless told to by --force.
    """
    from preft_cli.commands.output import print_json
    from preft_cli.commands.templates import read_template, templates, write_config
    from preft_cli.console import out, say

    if show_list:
        found = templates()
        if as_json:
            print_json({"templates": found})
        else:
            width = max(len(name) for name in found)
            out.print(
                "\n".join(f"{name:{width}}  {text}" for name, text in found.items()), markup=False, soft_wrap=True
            )
        return
    text = read_template(template)
    path = folder / "preft.yaml"
    written = {"template": template, "path": str(path.absolute())}
    if dry_run:
        print_json({**written, "exists": path.exists()})
        return
    write_config(path, text, force=force)
    if as_json:
        print_json(written)
    else:
        # An environment makes its problems itself.
        first = "" if "environment:" in text else "put conversations into train.jsonl, then "
        say(f"wrote {path} from the template {template}. Next: {first}preft train")
