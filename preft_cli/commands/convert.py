"""`preft convert`: adapters into the serving store, and back to PEFT."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from preft_cli.commands.options import Config, DryRun, Json, Set, flag, load_config

if TYPE_CHECKING:
    from preft_cli.convert.run import ConvertResult


class Method(StrEnum):
    """What a PEFT LoRA becomes."""

    lorap = "lorap"
    lora = "lora"


class Target(StrEnum):
    """The form to convert to."""

    store = "store"
    peft = "peft"


def command(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[SOURCE]...",
            help="Trained adapters, PEFT LoRA folders, or folders of those. Default: the adapter of preft train.",
            show_default=False,
        ),
    ] = None,
    config: Config = None,
    sets: Set = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="DIR", help="Folder to write NAME.preft to.", show_default="convert.store"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="Its model name on the server; for one SOURCE.", show_default="the adapter's own name"
        ),
    ] = None,
    method: Annotated[
        Method | None,
        typer.Option(
            "--method",
            help="For PEFT LoRA folders. lora: acts on all tokens, as it was trained. lorap: acts on prompt tokens "
            "only, which changes what the adapter computes.",
            show_default="lora",
        ),
    ] = None,
    to: Annotated[
        Target, typer.Option("--to", help="store: for preft serve. peft: back to a PEFT LoRA folder (needs --out).")
    ] = Target.store,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder to write to with --to peft.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Verify .preft files, or that the store holds the same as SOURCE.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Convert adapters to the form that preft serve reads.

    Each becomes one file NAME.preft in the store.
    One source that cannot be converted never stops the others; it is listed with its reason, and the exit code is 1.
    """
    from preft_cli.commands.output import needs_extras, print_json, quiet_stdout

    _check_usage(sources, name, to, out)
    loaded = load_config(config, sets, *flag("--store", "convert.store", store))
    given = [source.absolute() for source in sources or []]
    target: Literal["store", "peft"] = "peft" if to is Target.peft else "store"
    method_name = method.value if method else None
    out = out.absolute() if out else None
    with needs_extras("convert"), quiet_stdout(dry_run or as_json):
        if dry_run:
            from preft_cli.convert.run import plan_convert

            plan = plan_convert(
                given, loaded.config, loaded.root, name=name, method=method_name, to=target, out=out, check=check
            )
        else:
            from preft_cli.convert.run import convert

            result = convert(
                given, loaded.config, loaded.root, name=name, method=method_name, to=target, out=out, check=check
            )
    if dry_run:
        print_json(plan)
        return
    if as_json:
        print_json(result)
    else:
        _print(result)
    if result.failed:
        raise typer.Exit(1)


def _check_usage(sources: list[Path] | None, name: str | None, to: Target, out: Path | None) -> None:
    from preft_cli.errors import UserError

    if name is not None and len(sources or []) > 1:
        raise UserError(f"--name names one adapter, and {len(sources or [])} sources were given", 2)
    if to is Target.peft and out is None:
        raise UserError("--to peft needs --out DIR, the folder to write to", 2)
    if to is Target.store and out is not None:
        raise UserError("--out goes with --to peft; the folder of .preft files is --store", 2)


def _print(result: ConvertResult) -> None:
    """Written adapters on stdout, one a line; failures on stderr."""
    from preft_cli.console import out, warn

    for item in result.converted:
        line = f"{item.name}: {item.method}, rank {item.rank}, {item.bytes / 1e6:.1f} MB, {item.path}"
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    for failed in result.failed:
        warn(f"not converted: {failed.source}: {failed.reason}")
