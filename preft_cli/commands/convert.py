"""`preft convert`: adapters into the serving store, and back to PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from preft_cli.commands.convert_options import (
    Check,
    Force,
    InterventionOption,
    Jobs,
    MethodOption,
    Name,
    Out,
    PositionsOption,
    Sources,
    Store,
    Target,
    To,
)
from preft_cli.commands.options import Config, DryRun, Json, Set, flag, load_config

if TYPE_CHECKING:
    from preft_cli.convert.run import ConvertResult


def command(
    sources: Sources = None,
    config: Config = None,
    sets: Set = None,
    store: Store = None,
    name: Name = None,
    method: MethodOption = None,
    positions: PositionsOption = None,
    intervention: InterventionOption = None,
    to: To = Target.store,
    out: Out = None,
    check: Check = False,
    force: Force = False,
    jobs: Jobs = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Convert adapters to the form that preft serve reads.

    Each becomes one file NAME.preft in the store; what has not changed since is not converted again.
    One source that cannot be converted never stops the others; it is listed with its reason, and the exit code is 1.
    """
    from preft_cli.adapters.pyreft.told import Told
    from preft_cli.commands.output import needs_extras, print_json, quiet_stdout

    _check_usage(sources, name, to, out)
    loaded = load_config(config, sets, *flag("--store", "convert.store", store))
    given = [source.absolute() for source in sources or []]
    options: dict[str, Any] = {
        "name": name,
        "method": method.value if method else None,
        "told": Told(positions.value if positions else None, intervention.value if intervention else None),
        "to": to.value,
        "out": out.absolute() if out else None,
        "check": check,
    }
    with needs_extras("convert"), quiet_stdout(dry_run or as_json):
        if dry_run:
            from preft_cli.convert.run import plan_convert

            plan = plan_convert(given, loaded.config, loaded.root, **options)
        else:
            from preft_cli.convert.run import convert

            result = convert(given, loaded.config, loaded.root, **options, jobs=jobs, force=force)
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
        same = " (unchanged)" if item.status == "unchanged" else ""
        line = (
            f"{item.name}: {item.method}, rank {item.rank}, {item.dtype}, {item.bytes / 1e6:.1f} MB, {item.path}{same}"
        )
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    what = "not in order" if result.action == "check" else "not converted"
    for failed in result.failed:
        warn(f"{what}: {failed.source}: {failed.reason}")
