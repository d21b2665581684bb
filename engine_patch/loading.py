"""Bring an adapter file into a worker.

Upstream: `WorkerLoRAManager._load_adapter` reads PEFT folders and ignores what it does not know, so that tensors which fit
no module leave the base model to answer. Needed: `.preft` files, and an error instead of any answer from wrong weights.
Still fits while the manager registers what `_load_adapter` returns (see `contract.py`).
"""

from __future__ import annotations

import logging
from typing import Any

from engine_patch.adapter import Adapter
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.patching import replace
from engine_patch.proved import refuse_unproved
from engine_patch.ref import AdapterRef, parse_ref
from engine_patch.store.file import read_adapter

logger = logging.getLogger("vllm.preft")


def patch() -> None:
    """Teach the workers to load what an `AdapterRef` names, and to take no id for another content than it stands for."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

    def make_load(upstream: Any) -> Any:
        def _load_adapter(self: Any, lora_request: Any) -> Any:
            ref = parse_ref(lora_request.lora_path)
            self.preft_contents[lora_request.lora_int_id] = content(ref)
            if ref is None:
                return upstream(self, lora_request)
            if ref.prefill_only:
                refuse_unproved(self.preft_vllm_config)
            adapter = read_checked(ref)
            check_fits(adapter, ref, self)
            return to_lora_model(adapter, lora_request.lora_int_id, self.lora_config.lora_dtype)

        return _load_adapter

    def make_add(upstream: Any) -> Any:
        def add_adapter(self: Any, lora_request: Any) -> Any:
            if self._adapter_manager.get_adapter(lora_request.lora_int_id) is not None:
                require_same_content(self.preft_contents, lora_request)
            try:
                return upstream(self, lora_request)
            except Exception:
                # Upstream has entered it before its slot is filled, and would take it for loaded the next time.
                self._adapter_manager.remove_adapter(lora_request.lora_int_id)
                raise

        return add_adapter

    def make_init(upstream: Any) -> Any:
        def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            upstream(self, vllm_config, *args, **kwargs)
            self.preft_vllm_config = vllm_config
            self.preft_contents = {}

        return __init__

    replace(WorkerLoRAManager, "__init__", make_init)
    replace(WorkerLoRAManager, "_load_adapter", make_load)
    replace(LRUCacheWorkerLoRAManager, "add_adapter", make_add)


def content(ref: AdapterRef | None) -> tuple[str, str] | None:
    """What an adapter is, wherever its file lies; None for a stock adapter."""
    return (ref.method, ref.digest) if ref else None


def require_same_content(loaded: dict[int, tuple[str, str] | None], lora_request: Any) -> None:
    """Upstream takes an adapter id that is loaded for the adapter that is asked for. Here two contents never share one.

    Raises:
        PreftError: the id of `lora_request` stands for another content.
    """
    id_, wanted = lora_request.lora_int_id, content(parse_ref(lora_request.lora_path))
    if loaded.get(id_, wanted) != wanted:
        raise PreftError(
            f"adapter id {id_} stands for another adapter's weights, so {lora_request.lora_name!r} is not served with it;"
            " make requests with engine_patch.requests.lora_request, in one process"
        )


def read_checked(ref: AdapterRef) -> Adapter:
    """Read the file and make sure that it still holds what the request was admitted for.

    Raises:
        PreftError: the file is gone, damaged or holds something else by now.
    """
    adapter = read_adapter(ref.path)
    if adapter.method != ref.method or adapter.digest() != ref.digest:
        raise PreftError(f"{ref.path} was replaced while a request for its former content was waiting; ask again")
    return adapter


def check_fits(adapter: Adapter, ref: AdapterRef, manager: Any) -> None:
    """Refuse an adapter that this engine cannot serve exactly.

    Raises:
        PreftError: other base model, a rank above the engine's limit, modules that the engine does not have, or of other sizes.
    """
    inner = manager._adapter_manager
    limit = manager.lora_config.max_lora_rank
    if adapter.rank > limit:
        raise PreftError(
            f"{ref.path} has rank {adapter.rank}, this server holds up to {limit}; raise serve.max_lora_rank"
        )
    served = BaseFingerprint.from_hf_config(inner.model.config)
    if difference := adapter.base.mismatch(served):
        raise PreftError(f"{ref.path} belongs to another base model: {difference}")
    shapes = servable_shapes(inner)
    if unknown := sorted(set(adapter.loras) - set(shapes)):
        raise PreftError(f"{ref.path} adapts modules that this engine does not have: {', '.join(unknown[:5])}")
    for name, pair in adapter.loras.items():
        found = (pair.a.shape[1], pair.b.shape[0])
        if found != shapes[name]:
            raise PreftError(
                f"{ref.path} does not fit this engine: {name} goes from {found[0]} to {found[1]} features there,"
                f" from {shapes[name][0]} to {shapes[name][1]} here"
            )


def servable_shapes(inner: Any) -> dict[str, tuple[int, int]]:
    """(in, out) features of every linear layer that vLLM's adapter manager wraps, as on one device, by its name in the model."""
    shapes = {}
    for name, layer in inner.modules.items():
        base = layer.base_layer
        if not hasattr(base, "output_size"):  # embeddings and the LM head
            continue
        parts = inner.packed_modules.get(name)
        if not parts:
            shapes[name] = (base.input_size, base.output_size)
            continue
        if hasattr(base, "total_num_kv_heads"):  # `output_sizes` counts key and value heads once for each device
            kv_heads, v_size = base.total_num_kv_heads, getattr(base, "v_head_size", base.head_size)
            sizes = [base.total_num_heads * base.head_size, kv_heads * base.head_size, kv_heads * v_size]
        else:
            sizes = base.output_sizes
        shapes |= {part: (base.input_size, size) for part, size in zip(parts, sizes, strict=True)}
    return shapes


def to_lora_model(adapter: Adapter, lora_int_id: int, dtype: Any) -> Any:
    """The adapter as vLLM's `LoRAModel`, with the scale folded into B and both in the engine's dtype."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    loras = {
        name: LoRALayerWeights(
            name,
            pair.a.shape[0],
            pair.a.shape[0],
            pair.a.to(dtype),
            (pair.b.float() * pair.scaling).to(dtype),
            scaling=1.0,
        )
        for name, pair in adapter.loras.items()
    }
    return LoRAModel(lora_int_id, adapter.rank, loras)
