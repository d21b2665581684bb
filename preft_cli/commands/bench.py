"""`preft bench`: what adapters cost, and what prompt-only adapters give back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preft_cli.commands.options import Config, DryRun, Json, Set, load_config


def command(
    config: Config = None,
    sets: Set = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.json", help="Where to write the result.", show_default="runs/bench/"),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Measure throughput with and without adapters.

    The arms of bench.arms get the same requests. They run one after another, each in a process of its own.
    The exit code is 1 if a request failed.
    """
    from preft_cli.commands.output import needs_extras, print_json, quiet_stdout, require

    loaded = load_config(config, sets)
    with needs_extras("bench"), quiet_stdout(dry_run or as_json):
        if dry_run:
            from preft_cli.bench.plan import plan_bench

            plan = plan_bench(loaded.config, loaded.root)
        else:
            from preft_cli.bench.run import bench

            require("vllm", "bench")
            result = bench(loaded.config, loaded.root, out.absolute() if out else None)
    if dry_run:
        print_json(plan)
        return
    if as_json:
        print_json(result)
    else:
        from preft_cli.bench.report import print_result

        print_result(result)
    if result.failures:
        raise typer.Exit(1)
