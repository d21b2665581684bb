"""`GET /preft/status`: what `preft status` and monitoring ask a running server.

Upstream has routes from plugins, but loads them only where `VLLM_PLUGINS` names them, which would turn other plugins off. So
the route is added where upstream would add theirs. Still fits while `attach_endpoint_plugins` gets the app (see `contract.py`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from engine_patch import adapter_routes, contract, metrics, status
from engine_patch.errors import PreftError
from engine_patch.patching import replace
from engine_patch.pool.counters import PoolCounters

if TYPE_CHECKING:
    from engine_patch.directory import AdapterDirectory


class AdapterCounts(BaseModel):
    """Adapters of the server."""

    listed: int
    """Names that the server answers for now."""
    admitted: int
    """Names whose present file was asked for, and verified."""
    gpu_slots: int
    """Adapters whose prompt tokens one step can compute."""


class EngineSettings(BaseModel):
    """What the engine computes and samples with."""

    base: dict[str, Any]
    """`BaseFingerprint.to_dict` of the base model."""
    dtype: str
    max_model_len: int
    logprobs_mode: str
    """What log-probabilities are of; `processed_logprobs`: of the distribution after temperature and truncation."""
    tokens_route: bool
    """Whether there is `/inference/v1/generate`, which takes and gives token ids."""


class ServerStatus(BaseModel):
    """The answer."""

    live: bool
    """Whether the prompt rule is in place in every process of the engine."""
    preft: str
    vllm: str
    prefix_caching: bool
    engine: EngineSettings
    adapters: AdapterCounts
    pools: list[PoolCounters]
    """What the adapter pools of each worker hold and count."""
    processes: list[status.ProcessStatus] = Field(min_length=1)


async def server_status(engine_client: Any, directory: AdapterDirectory, options: Any = None) -> ServerStatus:
    """Ask every process.

    Args:
        engine_client: vLLM's `AsyncLLM`.
        directory: the adapters.
        options: that the server was started with.

    Raises:
        PreftError: the engine does not answer.
    """
    processes = await status.ask(engine_client)
    pools = await engine_client.collective_rpc("preft_count")
    distribution, version = contract.installed_version() or ("vllm", "not installed")
    config = engine_client.vllm_config
    return ServerStatus(
        live=all(process.live for process in processes),
        preft=importlib.metadata.version("preft"),
        vllm=f"{distribution} {version}",
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        engine=EngineSettings(
            base=directory.manifest.base,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            max_model_len=config.model_config.max_model_len,
            logprobs_mode=config.model_config.logprobs_mode,
            tokens_route=bool(getattr(options, "enable_scale_out", False) or getattr(options, "tokens_only", False)),
        ),
        adapters=AdapterCounts(
            listed=len(directory.served_names()),
            admitted=len(directory.admitted),
            gpu_slots=config.lora_config.max_loras,
        ),
        pools=[PoolCounters.model_validate(pool) for pool in pools],
        processes=processes,
    )


def patch(directory: AdapterDirectory) -> None:
    """Add our routes to the server that is about to start in this process."""
    adapter_routes.guard()
    # `vllm.entrypoints.launchers.app` binds the function by name.
    launcher = importlib.import_module("vllm.entrypoints.launchers.app")

    def make(upstream: Any) -> Any:
        def attach_endpoint_plugins(app: Any, supported_tasks: Any) -> None:
            upstream(app, supported_tasks)
            add_route(app, directory)
            adapter_routes.add_routes(app, directory)
            metrics.attach(app, directory)

        return attach_endpoint_plugins

    replace(launcher, "attach_endpoint_plugins", make)


def add_route(app: Any, directory: AdapterDirectory) -> None:
    """`GET /preft/status`: 200 if the rule is live everywhere, else 503; the body says more."""
    from fastapi.responses import JSONResponse

    async def answer() -> Any:
        try:
            found = await server_status(app.state.engine_client, directory, getattr(app.state, "args", None))
        except PreftError as error:
            return JSONResponse({"live": False, "error": str(error)}, 503)
        return JSONResponse(found.model_dump(), 200 if found.live else 503)

    app.add_api_route("/preft/status", answer, methods=["GET"])
