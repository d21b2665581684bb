"""The options of `preft bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.json", help="Where to write the result.", show_default="runs/bench/"),
]
PresetName = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="A benchmark with a name: ci, paper-0.5b, paper-8b, paper-70b or s-lora. It wins over the config; --set wins "
        "over it.",
    ),
]
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on",
        metavar="CONDITION",
        help="End with exit code 3 if this holds, such as 'lorap/base<0.9', 'lorap/base.low<0.8' or "
        "'lora.requests_per_second<5'. Can be given many times.",
    ),
]
SweepOver = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=VALUE,...",
        help="Measure once for each value of one key of bench, such as num_adapters=1,8,64,512, or of keys that move "
        "together, such as prompt_len:output_len=64:320,320:64.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on where an interrupted run with the same --out stopped; keeps what is done."),
]
