"""The command line of an arm's server: the arguments of `vllm.LLM` in the form that vLLM's server takes."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

from engine_patch.manifest import Listed, Manifest
from preft_cli.bench.engine import EngineSpec, plugin_options
from preft_cli.bench.online.load import BASE_NAME
from preft_cli.errors import UserError
from preft_cli.serving.options import to_arguments

HOST = "127.0.0.1"

STOCK_SERVER = "vllm.entrypoints.launchers.api_server.entry"
"""vLLM's server as a module: `vllm serve` asks for the metadata of a distribution named vllm, which the CPU build lacks."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def server_command(spec: EngineSpec, port: int) -> list[str]:
    """What starts the server; its files go to the spec's scratch folder.

    Raises:
        UserError: the plugin is asked for without an adapter to serve.
    """
    options: dict[str, Any] = {
        **spec.engine_args,
        "host": HOST,
        "port": port,
        "served_model_name": BASE_NAME,
        "generation_config": "vllm",  # as offline: no sampling options from a file of the model
        "disable_uvicorn_access_log": True,
    }
    if spec.plugin:
        options["additional_config"] = {"preft": plugin_options(spec)}
        return [sys.executable, "-m", "engine_patch.server", str(write_manifest(spec)), *to_arguments(options)]
    if spec.adapters:
        options["config"] = write_lora_modules(spec)
    return [sys.executable, "-m", STOCK_SERVER, *to_arguments(options)]


def adapter_name(path: Path) -> str:
    """The model name under which a `.preft` file or a PEFT folder is served."""
    return path.name.removesuffix(".preft")


def write_manifest(spec: EngineSpec) -> Path:
    """The adapters for preft's own server, set up as `preft serve` does: their folder is its store."""
    from engine_patch.store.file import read_header

    if not spec.adapters:
        raise UserError(f"bench arm {spec.arm}: an arm of preft's needs adapters")
    headers = {path.absolute(): read_header(path) for path in spec.adapters}
    manifest = Manifest(
        adapters={
            adapter_name(path): Listed(path=path, method=header.method, digest=header.digest)
            for path, header in headers.items()
        },
        store=next(iter(headers)).parent,
        base_names=[BASE_NAME],
        base=next(iter(headers.values())).base.to_dict(),
    )
    file = spec.scratch / "manifest.json"
    file.write_text(manifest.model_dump_json())
    return file


def write_lora_modules(spec: EngineSpec) -> Path:
    """The adapters for vLLM's server, in a config file: thousands of paths are too long for a command line."""
    modules = [json.dumps({"name": adapter_name(path), "path": str(path.absolute())}) for path in spec.adapters]
    file = spec.scratch / "lora-modules.yaml"
    file.write_text(json.dumps({"lora-modules": modules}))  # JSON is YAML, and needs no care with quotes
    return file
