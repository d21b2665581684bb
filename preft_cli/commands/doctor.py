"""`preft doctor`: what is missing on this machine, and how to mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from preft_cli.commands.options import Config, Json, Set, load_config

if TYPE_CHECKING:
    from preft_cli.doctor.checks import Check


def command(config: Config = None, sets: Set = None, as_json: Json = False) -> None:
    """Check this machine and name what is missing.

    Looks at Python, torch, vLLM, the plugin, GPU, memory, disk and the base model, with a remedy for each failure.
    The exit code is 1 if anything that preft needs is missing.
    """
    from preft_cli.commands.output import print_json
    from preft_cli.doctor.run import Diagnosis, diagnose

    loaded = load_config(config, sets)
    found = []
    for check in diagnose(loaded.config, loaded.root):
        found.append(check)
        if not as_json:
            _print(check)
    diagnosis = Diagnosis(checks=found)
    if as_json:
        print_json(diagnosis)
    if diagnosis.failed:
        raise typer.Exit(1)


def _print(check: Check) -> None:
    """One line a check, and a second one with the remedy."""
    from preft_cli.console import out

    style = {"ok": "green", "warning": "yellow", "failed": "bold red"}[check.status]
    out.print(f"{check.status:8}", style=style, end="", highlight=False)
    out.print(f"{check.name}: {check.found}", markup=False, highlight=False, soft_wrap=True)
    if check.remedy:
        out.print(f"        -> {check.remedy}", markup=False, highlight=False, soft_wrap=True)
