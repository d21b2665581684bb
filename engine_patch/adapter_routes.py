"""`/preft/adapters/NAME`: which content a name stands for now, and an end to requests that run on former ones.

Who replaces an adapter's file, such as a trainer whose next answers must come from its new weights, has to know that the server
has seen it, and not a file in some other folder. Upstream's API key guards paths by their beginnings, `/preft` not among them.
These routes tell names, as `/v1/models` does, and end requests of others, so they are added to what is guarded; `/preft/status`
stays as open as `/health`. Still fits while `AuthenticationMiddleware` asks `GUARDED_PREFIX` and `OutputProcessor` keeps the
requests (see `contract.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from engine_patch.errors import PreftError
from engine_patch.frontend import admit
from engine_patch.patching import replace
from engine_patch.ref import AdapterRef, parse_ref

if TYPE_CHECKING:
    from engine_patch.directory import AdapterDirectory

PREFIX = "/preft/adapters"


class ServedAdapter(BaseModel):
    """What the next request for a name is answered with."""

    name: str
    method: str
    digest: str
    path: Path
    """The file, as the server sees it."""


class Aborted(BaseModel):
    """Requests that were ended: each answer has the finish reason `abort`, and what was generated so far."""

    name: str
    digest: str
    """The content that the name stands for; requests on it go on."""
    aborted: int
    """Requests, whatever number of answers each was to give."""


def guard() -> None:
    """Ask for the API key, where the server has one, on these routes too."""
    authenticate = importlib.import_module("vllm.entrypoints.serve.middleware.authenticate")
    replace(authenticate, "GUARDED_PREFIX", lambda upstream: (*upstream, PREFIX))


def add_routes(app: Any, directory: AdapterDirectory) -> None:
    """`GET` and `POST .../abort`: 404 for a name that is unknown, 400 for an adapter that cannot be served; `error` says why."""
    from fastapi.responses import JSONResponse

    async def answer(name: str, make: Callable[[str, AdapterRef], Awaitable[BaseModel]]) -> Any:
        try:
            request = await admit(directory, app.state.openai_serving_models, name)
            ref = parse_ref(request.lora_path) if request else None
            if ref is None:
                return JSONResponse({"error": unknown(directory, name)}, 404)
            return JSONResponse((await make(name, ref)).model_dump(mode="json"))
        except PreftError as error:
            return JSONResponse({"error": str(error)}, 400)

    async def served(name: str, ref: AdapterRef) -> BaseModel:
        path = directory.find(name) or ref.path
        return ServedAdapter(name=name, method=ref.method, digest=ref.digest, path=path)

    async def abort_former(name: str, ref: AdapterRef) -> BaseModel:
        engine = app.state.engine_client
        found = former_requests(engine.output_processor, name, ref.digest)
        await engine.abort(found, internal=True)
        return Aborted(name=name, digest=ref.digest, aborted=len(found))

    async def show(name: str) -> Any:
        return await answer(name, served)

    async def abort(name: str) -> Any:
        return await answer(name, abort_former)

    app.add_api_route(f"{PREFIX}/{{name}}", show, methods=["GET"])
    app.add_api_route(f"{PREFIX}/{{name}}/abort", abort, methods=["POST"])


def unknown(directory: AdapterDirectory, name: str) -> str:
    """The message for a name that no adapter has."""
    where = f" in {directory.manifest.store}" if directory.manifest.store else ""
    return f"no adapter {name!r}{where}.{directory.nearest(name)}"


def former_requests(output_processor: Any, name: str, digest: str) -> list[str]:
    """Ids, as the engine gave them, of the requests for `name` that run on another content than `digest`.

    Of a request for several answers that of the whole: upstream forgets it only when that one is aborted.
    """
    found = set()
    for state in output_processor.request_states.values():
        ref = parse_ref(state.lora_request.lora_path) if state.lora_request else None
        if ref and state.lora_request.lora_name == name and ref.digest != digest:
            found.add(state.parent_req.request_id if state.parent_req else state.request_id)
    return sorted(found)
