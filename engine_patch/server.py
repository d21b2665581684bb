"""vLLM's OpenAI server with a folder of adapters: `python -m engine_patch.server MANIFEST [vLLM's own arguments]`.

The manifest is JSON (see `manifest.Manifest`). Links to the adapters in use lie in a folder beside it. Started as a module
because `vllm serve` asks for the metadata of a distribution named vllm, which the CPU build lacks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from engine_patch.directory import AdapterDirectory
from engine_patch.errors import PreftError
from engine_patch.manifest import Manifest
from engine_patch.plugin import why_inactive

REFUSED_ENVIRONMENT = {
    "VLLM_SKIP_MODEL_NAME_VALIDATION": "an unknown adapter name would be answered by the base model",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "adapters would come and go behind the server's back (replace their files instead)",
}
"""Environment variables of vLLM under which a server would answer from wrong weights."""


def prepare(manifest: Path) -> None:
    """Load the plugins as vLLM does, and refuse to go on unless ours is in place.

    Raises:
        PreftError: the plugin did not come up, or does not fit this vLLM.
    """
    from vllm.plugins import load_general_plugins

    from engine_patch import contract, frontend, plugin, status_route

    load_general_plugins()
    if not plugin.registered():
        raise PreftError("the preft plugin is not active in vLLM; its error is above (preft doctor may tell more)")
    contract.check(contract.SERVER_SYMBOLS)
    directory = AdapterDirectory(Manifest.model_validate_json(manifest.read_bytes()), manifest.parent / "live")
    frontend.patch(directory)
    status_route.patch(directory)


def parse_arguments(arguments: list[str]) -> Any:
    """Parse vLLM's own arguments with vLLM's own parser.

    Raises:
        PreftError: an option that vLLM does not have, or a value that it does not take.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise PreftError(f"vLLM does not take these options (serve.vllm_args): {message}")

    parsed = make_arg_parser(Parser(allow_abbrev=False)).parse_args(arguments)
    try:
        validate_parsed_serve_args(parsed)
    except (TypeError, ValueError) as error:
        raise PreftError(f"vLLM does not take these options (serve.vllm_args): {error}") from error
    return parsed


def main() -> None:
    """Take our argument, leave vLLM its own, and run its server. Exit code 2: an option was wrong."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m engine_patch.server MANIFEST.json [vLLM arguments]")
    for variable, danger in REFUSED_ENVIRONMENT.items():
        if os.environ.get(variable, "").lower() not in ("", "0", "false"):
            print(f"error: {variable} is set: {danger}; unset it", file=sys.stderr)
            sys.exit(2)
    if reason := why_inactive():
        sys.exit(f"error: the preft plugin is not active in vLLM: {reason}. A server without it would answer wrongly.")
    try:
        arguments = parse_arguments(sys.argv[2:])
    except PreftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        prepare(Path(sys.argv[1]))
    except PreftError as error:
        sys.exit(f"error: {error}")
    run(arguments)


def run(arguments: Any) -> None:
    """Serve until a signal comes, as `vllm.entrypoints.launchers.api_server.entry.main` does."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    if os.environ.get("PREFT_END_WITH_STDIN"):
        threading.Thread(target=end_with_stdin, daemon=True).start()
    cli_env_setup()
    configure_logging_from_args(arguments)
    try:
        uvloop.run(run_server(arguments))
    except Exception as error:
        logging.getLogger("vllm.preft").debug("the server failed", exc_info=True)
        sys.exit(f"error: the server could not go on: {error}")


def end_with_stdin() -> None:
    """End the process group when the pipe on standard input closes, that is when `preft serve` is gone."""
    os.read(0, 1)
    os.killpg(0, signal.SIGTERM)
    time.sleep(10)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
