"""Every adapter of the server's folder is a model name, from the moment that its file is there.

Upstream knows an adapter only after loading it (`--lora-modules`, `/v1/load_lora_adapter`). Needed: thousands of names at
once, a reason instead of a dead engine for a damaged file, and the nearest names for a wrong one. Still fits while
`OpenAIServingModels.lora_requests` is what requests are looked up in (see `contract.py`).
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from engine_patch.directory import AdapterDirectory
from engine_patch.errors import PreftError
from engine_patch.patching import replace
from engine_patch.pool.limits import Limits
from engine_patch.proved import refuse_unproved
from engine_patch.ref import is_prefill_only

logger = logging.getLogger("vllm.preft")


def refuse_beam_search(request: Any, adapter: Any) -> None:
    """Raise PreftError where `request` asks for beam search with a prefill-only adapter (see `proved.guard`)."""
    if getattr(request, "use_beam_search", False) and is_prefill_only(adapter):
        raise PreftError("beam search is not possible with a prefill-only adapter: it would act on generated tokens")


def list_names(directory: AdapterDirectory, lora_requests: dict[str, Any]) -> None:
    """Bring the server's table of adapters up to what the folder holds."""
    names = directory.names()
    for name in lora_requests.keys() - names:
        directory.forget(name)
        del lora_requests[name]
    for name in sorted(names - lora_requests.keys()):
        if directory.is_refused(name):
            continue
        try:
            lora_requests[name] = directory.first_request(name)
        except PreftError as error:
            directory.refuse(name)
            logger.error("not serving %s: %s", name, error)


async def admit(directory: AdapterDirectory, models: Any, name: str) -> Any:
    """Make `models` answer for `name` with its file's present content; None if there is no such adapter.

    Raises:
        PreftError: there is one that cannot be served.
    """
    if directory.find(name) is None:
        directory.forget(name)
        models.lora_requests.pop(name, None)
        return None

    async def in_use() -> list[str]:
        digests: list[str] = await models.engine_client.engine_core.call_utility_async("preft_in_use")
        return digests

    request = models.lora_requests[name] = await directory.admit(name, in_use)
    return request


def patch(directory: AdapterDirectory) -> None:
    """Put the directory's names into the server that is about to start in this process."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.serving import BaseServing

    from engine_patch.status import ask, require_live

    def make_init(upstream: Any) -> Any:
        async def init_static_loras(self: Any) -> None:
            # The server listens only after this returns: no readiness without the rule in every worker.
            refuse_unproved(self.engine_client.vllm_config)
            require_live(await ask(self.engine_client))
            directory.limits = Limits.model_validate((await self.engine_client.collective_rpc("preft_limits"))[0])
            await upstream(self)
            list_names(directory, self.lora_requests)

        return init_static_loras

    def make_list(upstream: Any) -> Any:
        async def show_available_models(self: Any) -> Any:
            list_names(directory, self.lora_requests)
            return await upstream(self)

        return show_available_models

    def make_check(upstream: Any) -> Any:
        async def _check_model(self: Any, request: Any) -> Any:
            if request.model and not self.models.is_base_model(request.model):
                try:
                    if adapter := await admit(directory, self.models, request.model):
                        refuse_beam_search(request, adapter)
                except PreftError as error:
                    return self.create_error_response(str(error), "BadRequestError", HTTPStatus.BAD_REQUEST, "model")
            answer = await upstream(self, request)
            if answer is not None and answer.error.code == HTTPStatus.NOT_FOUND.value:
                answer.error.message += directory.nearest(request.model or "")
            return answer

        return _check_model

    replace(OpenAIServingModels, "init_static_loras", make_init)
    replace(OpenAIServingModels, "show_available_models", make_list)
    replace(BaseServing, "_check_model", make_check)
