"""Every adapter of the server is a model name: in `/v1/models` from the start, in the engine from its first request on.

Upstream knows an adapter only after loading it (`--lora-modules`, `/v1/load_lora_adapter`). Needed: thousands of names at
once, a reason instead of a dead engine for a damaged file, and the nearest names for a wrong one. Still fits while
`OpenAIServingModels.lora_requests` is what requests are looked up in (see `contract.py`).
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
import shutil
from collections import defaultdict
from http import HTTPStatus
from pathlib import Path
from typing import Any

from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.patching import replace
from engine_patch.proved import refuse_unproved
from engine_patch.ref import AdapterRef, is_prefill_only, parse_ref
from engine_patch.requests import request_for
from engine_patch.store.file import read_header

logger = logging.getLogger("vllm.preft")

Stamp = tuple[int, int, int]
"""Modification time (ns), size and inode of a file."""


class AdapterDirectory:
    """Names to adapter files, and which content of each the engine has accepted."""

    def __init__(
        self, paths: dict[str, Path], base: BaseFingerprint, copies: Path, template: str | None = None
    ) -> None:
        """The adapters of a server.

        Args:
            paths: the file of each name.
            base: the model that they must belong to.
            copies: a folder of this server's own, for the files that its engine may read again at any time.
            template: digest of the server's chat template; None where it is not known.
        """
        self.paths, self._base, self._copies, self._template = paths, base, copies, template
        self.admitted: dict[str, Stamp] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        copies.mkdir(parents=True, exist_ok=True)

    def request(self, name: str) -> Any:
        """The `LoRARequest` for what the file of `name` holds now.

        Raises:
            PreftError: the file is gone or damaged, or belongs to another base model or chat template.
        """
        header = read_header(self.paths[name])
        if difference := header.base.mismatch(self._base):
            raise PreftError(f"adapter {name!r} belongs to another base model: {difference}")
        trained_with = header.meta.get("chat_template_digest")
        if self._template and trained_with and trained_with != self._template:
            raise PreftError(f"adapter {name!r} was trained with another chat template than this server uses")
        return request_for(name, self.paths[name], header)

    async def admit(self, models: Any, name: str) -> None:
        """Make `models` answer for `name` with the file's present content, after the engine has loaded it once.

        Requests for one name wait for each other, so that none after a replacement gets the former content.

        Raises:
            PreftError: the adapter cannot be served; the message says why.
        """
        async with self._locks[name]:
            stamp = file_stamp(self.paths[name])
            if self.admitted.get(name) == stamp:
                return
            try:
                while (request := self._with_own_file(self.request(name))) is None:
                    stamp = file_stamp(self.paths[name])
            except OSError as error:
                raise PreftError(f"adapter {name!r} cannot be read: {error.strerror} ({error.filename})") from error
            try:
                await models.engine_client.add_lora(request)
            except Exception as error:
                raise PreftError(f"adapter {name!r} cannot be served: {error}") from error
            models.lora_requests[name] = request
            self.admitted[name] = stamp

    def _with_own_file(self, request: Any) -> Any:
        """The same request for a link to the file: replacing the file in the store leaves the link's content alone.

        The engine reads an adapter again whenever it has dropped it, and must find what the request was admitted for. None
        if the file was replaced at this very moment: what it holds now is to be asked for.
        """
        ref = parse_ref(request.lora_path)
        assert ref is not None
        own = self._copies / f"{ref.digest}{ref.path.suffix}"
        if not own.exists() or read_header(own).digest != ref.digest:
            aside = own.with_name(f"new-{own.name}")
            aside.unlink(missing_ok=True)
            try:
                os.link(ref.path, aside)
            except OSError:  # another file system
                shutil.copyfile(ref.path, aside)
            if read_header(aside).digest != ref.digest:
                return None
            aside.replace(own)
        return type(request)(request.lora_name, request.lora_int_id, AdapterRef(own, ref.method, ref.digest).encode())

    def nearest(self, name: str) -> str:
        """A half sentence with the names most like `name`, or nothing."""
        close = difflib.get_close_matches(name, list(self.paths), n=3, cutoff=0.5)
        return f" Did you mean {' or '.join(close)}?" if close else ""


def refuse_beam_search(request: Any, adapter: Any) -> None:
    """Raise PreftError where `request` asks for beam search with a prefill-only adapter (see `proved.guard`)."""
    if getattr(request, "use_beam_search", False) and is_prefill_only(adapter):
        raise PreftError("beam search is not possible with a prefill-only adapter: it would act on generated tokens")


def file_stamp(path: Path) -> Stamp:
    """What changes when a file is replaced.

    Raises:
        PreftError: the file cannot be read.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise PreftError(f"the adapter's file cannot be read: {error.strerror} ({path})") from None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


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
            await upstream(self)
            for name in directory.paths:
                try:
                    self.lora_requests[name] = directory.request(name)
                except PreftError as error:
                    logger.error("not serving %s: %s", name, error)

        return init_static_loras

    def make_check(upstream: Any) -> Any:
        async def _check_model(self: Any, request: Any) -> Any:
            if request.model in directory.paths and not self.models.is_base_model(request.model):
                try:
                    await directory.admit(self.models, request.model)
                    refuse_beam_search(request, self.models.lora_requests[request.model])
                except PreftError as error:
                    return self.create_error_response(str(error), "BadRequestError", HTTPStatus.BAD_REQUEST, "model")
            answer = await upstream(self, request)
            if answer is not None and answer.error.code == HTTPStatus.NOT_FOUND.value:
                answer.error.message += directory.nearest(request.model or "")
            return answer

        return _check_model

    replace(OpenAIServingModels, "init_static_loras", make_init)
    replace(BaseServing, "_check_model", make_check)
