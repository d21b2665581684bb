"""`preft store`: what lies in a serving store, for people."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preft_cli.commands.options import DEFAULT_CONFIG, Config, Json, Set, flag, load_config

if TYPE_CHECKING:
    from preft_cli.store.results import BrokenFile, StoreInfo

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    help="List, describe and remove the adapters of a store.",
)

Store = Annotated[Path | None, typer.Option("--store", metavar="DIR", help="The store.", show_default="convert.store")]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of adapters in the store.")]


class Sort(StrEnum):
    """What a listing goes by."""

    name = "name"
    size = "size"
    when = "when"
    rank = "rank"


@app.command("ls")
def ls(
    config: Config = None,
    sets: Set = None,
    store: Store = None,
    sort: Annotated[
        Sort, typer.Option("--sort", help="What goes first: a to z, or the largest, newest or highest.")
    ] = Sort.name,
    as_json: Json = False,
) -> None:
    """List the adapters: name, method, rank, size, base model, digest, when.

    Files that no server would use are listed with their reason, and the exit code is 1.
    """
    from preft_cli.commands.output import print_json
    from preft_cli.store.listing import list_adapters

    result = list_adapters(_folder(config, sets, store), sort.value)
    if as_json:
        print_json(result)
    else:
        from preft_cli.store.table import print_rows

        print_rows(result.adapters)
    _end(result.broken, as_json)


@app.command("info")
def info(names: Names, config: Config = None, sets: Set = None, store: Store = None, as_json: Json = False) -> None:
    """Show everything that the files' headers say: modules, ranks, scalings, where they come from."""
    from preft_cli.commands.output import print_json
    from preft_cli.store.info import describe

    result = describe(_folder(config, sets, store), names)
    if as_json:
        print_json(result)
    else:
        for adapter in result.adapters:
            _print_info(adapter)
    _end(result.broken, as_json)


@app.command("rm")
def rm(
    names: Names,
    config: Config = None,
    sets: Set = None,
    store: Store = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove adapters, also while a server runs. Removes nothing if one of the names is unknown."""
    from preft_cli.commands.output import print_json
    from preft_cli.errors import UserError
    from preft_cli.store.names import pick
    from preft_cli.store.remove import remove

    folder = _folder(config, sets, store)
    files = pick(folder, names)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("preft store rm asks before it removes anything, and there is no terminal: add --yes", 2)
        typer.confirm(f"Remove {', '.join(files)} from {folder}?", abort=True, err=True)
    result = remove(folder, files)
    if as_json:
        print_json(result)
    else:
        for name in result.removed:
            print(f"removed {name}")
    _end(result.failed, as_json)


def _folder(config: Path | None, sets: list[str] | None, store: Path | None) -> Path:
    if store is not None and config is None and not sets and not DEFAULT_CONFIG.exists():
        return store.absolute()  # nothing to read, nothing to say about defaults
    loaded = load_config(config, sets, *flag("--store", "convert.store", store))
    return loaded.root / loaded.config.convert.store


def _end(broken: list[BrokenFile], as_json: bool) -> None:
    """Name what is broken, on stderr unless the JSON document has it, and end with exit code 1 if anything is."""
    if not broken:
        return
    if not as_json:
        from preft_cli.console import warn

        for file in broken:
            warn(f"{file.path}: {file.reason}")
    raise typer.Exit(1)


def _print_info(adapter: StoreInfo) -> None:
    """A block of lines for one adapter."""
    from preft_cli.store.table import size

    lines: dict[str, Any] = {
        "method": adapter.method,
        "rank": adapter.rank,
        "dtype": adapter.dtype,
        "file": f"{adapter.path}, {size(adapter.bytes)}, {adapter.modified}",
        "pages": f"{adapter.pages}, {size(adapter.weight_bytes)}",
        "digest": adapter.digest,
        "base": adapter.base,
        "": ", ".join(f"{key} {value}" for key, value in adapter.fingerprint.items()),
    }
    print(adapter.name)
    for title, value in lines.items():
        print(f"  {title:8}{value}")
    for group in adapter.modules:
        where = f", layers {group.layers}" if group.layers else ""
        print(
            f"  {'module':8}{group.module} [{group.in_features} -> {group.out_features}], rank {group.rank}, "
            f"scaling {group.scaling:g}{where}"
        )
    for key, value in sorted(adapter.meta.items()):
        print(f"  {'meta':8}{key}: {value}")
