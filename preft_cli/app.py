"""The `preft` command: the list of commands, and what happens to errors.

Exit codes: 0 done, 1 failed, 2 bad usage or config, 3 a `--fail-on` condition was met, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from engine_patch.errors import PreftError
from preft_cli import __version__
from preft_cli.commands import bench, convert, data, doctor, init, serve, status, store, train
from preft_cli.errors import UserError
from preft_cli.threads import wait_politely

app = typer.Typer(
    name="preft",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help takes a third of the time, and reads well in a pipe
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A first project: preft init, then preft train, preft convert, preft serve. Each command has --help.",
)
app.command("init")(init.command)
app.add_typer(data.app, name="data")
app.command("train")(train.command)
app.command("convert")(convert.command)
app.command("serve")(serve.command)
app.add_typer(bench.app, name="bench")
app.add_typer(store.app, name="store")
app.command("status")(status.command)
app.command("doctor")(doctor.command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"preft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train, convert, serve and measure adapters that act on prompt tokens only."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line (default: this process' arguments) and exit with its code; people see no traceback."""
    wait_politely()
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        app(args=arguments, prog_name="preft")
    except SystemExit as end:  # Typer's own end: 0, a command's code, 2 for bad usage, 130 for Ctrl-C
        return _code(end.code)
    except UserError as problem:
        _tell_problem(problem)
        return problem.exit_code
    except KeyboardInterrupt:
        return _code(130)
    except BrokenPipeError:  # `preft store ls | head`: whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains when it flushes at exit
        return 1
    except (PreftError, OSError) as problem:  # a damaged adapter; a full disk, a file that may not be read
        _tell(str(problem))
        return 1
    except Exception as bug:
        if os.environ.get("PREFT_TRACEBACK"):
            traceback.print_exc()
        _tell(
            f"internal error: {type(bug).__name__}: {bug}\n"
            "This is a bug in preft, please report it; PREFT_TRACEBACK=1 in the environment shows the traceback."
        )
        return 1
    return 0


def _code(code: int | str | None) -> int:
    if code == 130:
        print("interrupted", file=sys.stderr)
    return code if isinstance(code, int) else int(code is not None)


def _tell_problem(problem: UserError) -> None:
    """Config errors keep their `file:line:column:` at the start of the line, where editors and CI look for it."""
    from preft_cli.config.problems import ConfigErrors
    from preft_cli.console import say

    if not isinstance(problem, ConfigErrors):
        _tell(str(problem))
        return
    say(str(problem))
    if len(problem.problems) > 1:
        _tell(f"{len(problem.problems)} problems in the config")


def _tell(message: str) -> None:
    from preft_cli.console import error

    error(message)
