"""Results on stdout, everything else on stderr; and missing packages in plain words."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from pydantic import BaseModel

from preft_cli.errors import UserError

EXTRA_OF = {
    "torch": "train",
    "transformers": "train",
    "peft": "train",
    "datasets": "train",
    "pyarrow": "train",
    "jinja2": "train",
    "accelerate": "train",
    "safetensors": "train",
    "matplotlib": "train",
    "gguf": "train",
    "numpy": "train",
    "huggingface_hub": "train",
    "filelock": "train",
    "trl": "rl",
    "math_verify": "rl",
    "reasoning_gym": "rl",
    "vllm": "cpu",
}
"""Which extra brings a package that the core install lacks."""


def print_json(result: BaseModel | dict[str, Any]) -> None:
    """Print one JSON document on stdout."""
    text = result.model_dump_json(indent=2) if isinstance(result, BaseModel) else json.dumps(result, indent=2)
    print(text, flush=True)


@contextmanager
def quiet_stdout(wanted: bool = True) -> Iterator[None]:
    """While the body runs, whatever libraries and child processes print on stdout goes to stderr (for `--json`)."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def missing(package: str, command: str) -> UserError:
    """The error for a package of `EXTRA_OF` that is not installed."""
    extra = EXTRA_OF[package]
    gpu = " (on a machine with a GPU: 'preft[gpu]')" if extra == "cpu" else ""
    return UserError(
        f"preft {command} needs the package {package}, which is not installed: pip install 'preft[{extra}]'{gpu}"
    )


def require(package: str, command: str) -> None:
    """Refuse early what a child process would stumble over later."""
    from preft_cli.doctor.facts import has_module

    if not has_module(package):
        raise missing(package, command)


@contextmanager
def needs_extras(command: str) -> Iterator[None]:
    """A package that is missing inside of the body becomes an error that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        raise missing(package, command) from error
