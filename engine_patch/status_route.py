"""`GET /preft/status`: what `preft status` and monitoring ask a running server.

Upstream has routes from plugins, but loads them only where `VLLM_PLUGINS` names them, which would turn other plugins off. So
the route is added where upstream would add theirs. Still fits while `attach_endpoint_plugins` gets the app (see `contract.py`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from engine_patch import contract, status
from engine_patch.errors import PreftError
from engine_patch.patching import replace

if TYPE_CHECKING:
    from engine_patch.frontend import AdapterDirectory


class AdapterCounts(BaseModel):
    """Adapters of the server."""

    listed: int
    """Names that the server was started with."""
    admitted: int
    """Names that the engine has loaded at least once."""
    gpu_slots: int
    """Adapters whose prompt tokens one step can compute."""


class ServerStatus(BaseModel):
    """The answer."""

    live: bool
    """Whether the prompt rule is in place in every process of the engine."""
    preft: str
    vllm: str
    prefix_caching: bool
    adapters: AdapterCounts
    processes: list[status.ProcessStatus] = Field(min_length=1)


async def server_status(engine_client: Any, directory: AdapterDirectory) -> ServerStatus:
    """Ask every process.

    Raises:
        PreftError: the engine does not answer.
    """
    processes = await status.ask(engine_client)
    distribution, version = contract.installed_version() or ("vllm", "not installed")
    config = engine_client.vllm_config
    return ServerStatus(
        live=all(process.live for process in processes),
        preft=importlib.metadata.version("preft"),
        vllm=f"{distribution} {version}",
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        adapters=AdapterCounts(
            listed=len(directory.paths), admitted=len(directory.admitted), gpu_slots=config.lora_config.max_loras
        ),
        processes=processes,
    )


def patch(directory: AdapterDirectory) -> None:
    """Add the route to the server that is about to start in this process."""
    # `vllm.entrypoints.launchers.app` binds the function by name.
    launcher = importlib.import_module("vllm.entrypoints.launchers.app")

    def make(upstream: Any) -> Any:
        def attach_endpoint_plugins(app: Any, supported_tasks: Any) -> None:
            upstream(app, supported_tasks)
            add_route(app, directory)

        return attach_endpoint_plugins

    replace(launcher, "attach_endpoint_plugins", make)


def add_route(app: Any, directory: AdapterDirectory) -> None:
    """`GET /preft/status`: 200 if the rule is live everywhere, else 503; the body says more."""
    from fastapi.responses import JSONResponse

    async def answer() -> Any:
        try:
            found = await server_status(app.state.engine_client, directory)
        except PreftError as error:
            return JSONResponse({"live": False, "error": str(error)}, 503)
        return JSONResponse(found.model_dump(), 200 if found.live else 503)

    app.add_api_route("/preft/status", answer, methods=["GET"])
