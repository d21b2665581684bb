"""The options of `preft train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the last checkpoint in the output folder; with --sweep: keep finished runs."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run left in the output folder.")]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=VALUE,...",
        help="Train once for each value, such as adapter.rank=8,16,32; given several times: for each combination. Keys that "
        "move together: adapter.rank:adapter.alpha=8:16,16:32.",
    ),
]
Choose = Annotated[
    list[str] | None,
    typer.Option(
        "--choose",
        metavar="KEY",
        help="A swept key whose best value is chosen by the loss on train.validation_file, for each combination of the others.",
    ),
]
Jobs = Annotated[
    int, typer.Option("--jobs", min=1, metavar="N", help="Runs of a sweep at once, each in a process of its own.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE.json", help="Where to write the sweep's result and picture, beside the output folder."
    ),
]
