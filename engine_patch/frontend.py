"""Every adapter of the server is a model name: in `/v1/models` from the start, in the engine from its first request on.

Upstream knows an adapter only after loading it (`--lora-modules`, `/v1/load_lora_adapter`). Needed: thousands of names at
once, a reason instead of a dead engine for a damaged file, and the nearest names for a wrong one. Still fits while
`OpenAIServingModels.lora_requests` is what requests are looked up in (see `contract.py`).
"""

from __future__ import annotations

import difflib
import logging
from http import HTTPStatus
from pathlib import Path
from typing import Any

from engine_patch.errors import PreftError
from engine_patch.patching import replace
from engine_patch.requests import lora_request

logger = logging.getLogger("vllm.preft")


class AdapterDirectory:
    """Names to adapter files, and which content of each the engine has accepted."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self.paths = paths
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._accepted: set[str] = set()

    def current_request(self, name: str, known: Any | None) -> Any:
        """The `LoRARequest` for what the file holds now; `known` again if the file is untouched.

        Raises:
            PreftError: the file is gone or damaged.
        """
        path = self.paths[name]
        try:
            stat = path.stat()
        except OSError as error:
            raise PreftError(f"the file of adapter {name!r} cannot be read: {error.strerror} ({path})") from None
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if known is None or self._stamps.get(name) != stamp:
            known = lora_request(name, path)
            self._stamps[name] = stamp
        return known

    async def admit(self, models: Any, name: str) -> None:
        """Make `models` answer for `name` with the file's present content, which the engine has loaded once.

        Raises:
            PreftError: the adapter cannot be served; the message says why.
        """
        request = self.current_request(name, models.lora_requests.get(name))
        if request.lora_path not in self._accepted:
            try:
                await models.engine_client.add_lora(request)
            except Exception as error:
                self._stamps.pop(name, None)
                raise PreftError(f"adapter {name!r} cannot be served: {error}") from error
            self._accepted.add(request.lora_path)
        models.lora_requests[name] = request

    def nearest(self, name: str) -> str:
        """A half sentence with the names most like `name`, or nothing."""
        close = difflib.get_close_matches(name, list(self.paths), n=3, cutoff=0.5)
        return f" Did you mean {' or '.join(close)}?" if close else ""


def patch(directory: AdapterDirectory) -> None:
    """Put the directory's names into the server that is about to start in this process."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.serving import BaseServing

    from engine_patch.status import require_live

    def make_init(upstream: Any) -> Any:
        async def init_static_loras(self: Any) -> None:
            # The server listens only after this returns: no readiness without the rule in every worker.
            require_live(await self.engine_client.collective_rpc("preft_status"))
            await upstream(self)
            for name in directory.paths:
                try:
                    self.lora_requests[name] = directory.current_request(name, None)
                except PreftError as error:
                    logger.error("not serving %s: %s", name, error)

        return init_static_loras

    def make_check(upstream: Any) -> Any:
        async def _check_model(self: Any, request: Any) -> Any:
            if request.model in directory.paths and not self.models.is_base_model(request.model):
                try:
                    await directory.admit(self.models, request.model)
                except PreftError as error:
                    return self.create_error_response(str(error), "BadRequestError", HTTPStatus.BAD_REQUEST, "model")
            answer = await upstream(self, request)
            if answer is not None and answer.error.code == HTTPStatus.NOT_FOUND.value:
                answer.error.message += directory.nearest(request.model or "")
            return answer

        return _check_model

    replace(OpenAIServingModels, "init_static_loras", make_init)
    replace(BaseServing, "_check_model", make_check)
