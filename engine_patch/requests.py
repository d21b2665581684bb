"""Make vLLM's `LoRARequest` for an adapter file: what callers of `vllm.LLM` need."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

from engine_patch.ref import AdapterRef
from engine_patch.store.file import read_header
from engine_patch.store.format import Header

_lock = threading.Lock()
_ids: dict[str, int] = {}
_counter = itertools.count(1_000_000)  # far from the small numbers that people give their own LoRARequests


def adapter_id(digest: str) -> int:
    """The integer under which this process knows the content `digest`: another content, another id."""
    with _lock:
        if digest not in _ids:
            _ids[digest] = next(_counter)
        return _ids[digest]


def lora_request(name: str, path: Path) -> Any:
    """The `vllm.lora.request.LoRARequest` for the adapter file `path`, under the model name `name`.

    Raises:
        PreftError: if the file is not a readable adapter.
    """
    return request_for(name, path, read_header(path))


def request_for(name: str, path: Path, header: Header) -> Any:
    """The same where the file's `header` has been read already."""
    from vllm.lora.request import LoRARequest

    ref = AdapterRef(path.resolve(), header.method, header.digest)
    return LoRARequest(name, adapter_id(header.digest), ref.encode())
