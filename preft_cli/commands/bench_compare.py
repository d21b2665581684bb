"""`preft bench compare`: what changed between two results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft_cli.commands.options import Json


def command(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A result of preft bench.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
    as_json: Json = False,
) -> None:
    """Show what changed from one result to another beyond noise.

    First comes what differs in how the two were measured. A number counts as changed if the ranges of its repetitions in A
    and in B lie apart.
    """
    from preft_cli.bench.difference import compare
    from preft_cli.bench.load import load_result
    from preft_cli.commands.output import print_json

    difference = compare(load_result(a), load_result(b))
    if as_json:
        print_json(difference)
    else:
        from preft_cli.bench.difference_report import print_difference

        print_difference(difference)
