"""Make vLLM's `LoRARequest` for an adapter file: what callers of `vllm.LLM` need."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

from engine_patch.ref import AdapterRef
from engine_patch.store.file import read_header

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
    header = read_header(path)
    return request_of(name, AdapterRef(path.resolve(), header.method, header.digest))


def request_of(name: str, ref: AdapterRef) -> Any:
    """The same where the file has been read already."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, adapter_id(ref.digest), ref.encode())
