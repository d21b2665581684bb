"""The options of `preft convert` that no other command has."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Method(StrEnum):
    """What an adapter becomes."""

    lorap = "lorap"
    lora = "lora"
    direftp = "direftp"
    direft = "direft"
    lorap_direftp = "lorap+direftp"
    lora_direft = "lora+direft"


class Positions(StrEnum):
    """Where the adapter of a pyreft folder acts."""

    prompt = "prompt"
    all = "all"


class Intervention(StrEnum):
    """pyreft's classes that can be served."""

    direft = "direft"
    nodireft = "nodireft"


class Target(StrEnum):
    """The form to convert to."""

    store = "store"
    peft = "peft"


Sources = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[SOURCE]...",
        help="Trained adapters, PEFT LoRA folders, pyreft folders, folders of those, or patterns such as 'adapters/user-*'. "
        "Default: the adapter of preft train.",
        show_default=False,
    ),
]
Store = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="Folder to write NAME.preft to.", show_default="convert.store"),
]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Its model name on the server; for one SOURCE.", show_default="the adapter's own name"),
]
MethodOption = Annotated[
    Method | None,
    typer.Option(
        "--method",
        help="lora, direft, lora+direft: acts on all tokens, as a PEFT LoRA was trained. lorap, direftp, "
        "lorap+direftp: acts on prompt tokens only. Another one than it was trained as changes what the adapter computes.",
        show_default="as it was trained",
    ),
]
PositionsOption = Annotated[
    Positions | None,
    typer.Option(
        "--positions",
        help="For pyreft folders, which do not record where they act. prompt: on all prompt tokens. all: on every token. "
        "Other positions than those of its training change what the adapter computes.",
        show_default="none: refused",
    ),
]
InterventionOption = Annotated[
    Intervention | None,
    typer.Option(
        "--intervention",
        help="For pyreft folders without config.json, such as its trainer's checkpoints: the class of their interventions.",
        show_default="what config.json says",
    ),
]
To = Annotated[
    Target, typer.Option("--to", help="store: for preft serve. peft: back to a PEFT LoRA folder (needs --out).")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder to write to with --to peft.")]
Check = Annotated[
    bool, typer.Option("--check", help="Verify .preft files, or that the store holds the same as SOURCE.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Convert also what the store holds already, made from the same files.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        max=1024,
        help="Processes that share the work; 1: none but this one.",
        show_default="as many as cores, if that is faster",
    ),
]
