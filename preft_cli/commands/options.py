"""The options that the commands share, and how they turn into a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from preft_cli.config.load import Loaded
    from preft_cli.config.overrides import Override

DEFAULT_CONFIG = Path("preft.yaml")

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="The project's config.", show_default=str(DEFAULT_CONFIG)),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Use another value than the config's, such as train.epochs=2. Can be given many times.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, as JSON, and stop. Loads no model.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON document on stdout; messages go to stderr.")
]


def load_config(
    config: Path | None,
    sets: list[str] | None,
    *flags: Override,
    preset: Sequence[Override] = (),
    required: bool = False,
) -> Loaded:
    """The config of a command: the file, under `preset`, under `--set`, under `flags` such as `--store`.

    Without `--config` and without a ./preft.yaml, the defaults serve, unless the command says `required`.
    """
    from preft_cli.config.load import load, load_defaults

    overrides: list[str | Override] = [*preset, *(sets or []), *flags]
    if config is None and not required and not DEFAULT_CONFIG.exists():
        from preft_cli.console import say

        loaded = load_defaults(Path.cwd(), overrides)
        say(f"no {DEFAULT_CONFIG} here: using the defaults (preft init writes one)")
        return loaded
    return load(config or DEFAULT_CONFIG, overrides)


def flag(option: str, key: str, value: object) -> list[Override]:
    """The override for an option that was given: `*flag("--port", "serve.port", port)`; none if it was not.

    A path on the command line is relative to the current folder, unlike one in the config, so it is made absolute.
    """
    from preft_cli.config.overrides import Override

    if value is None:
        return []
    meant = str(value.absolute()) if isinstance(value, Path) else value
    return [Override(tuple(key.split(".")), meant, f"{option} {value}")]
