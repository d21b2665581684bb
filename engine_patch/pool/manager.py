"""vLLM's LoRA manager over our pool.

Upstream: every wrapped layer has arrays of its own with one place for each slot, as large as the largest rank; bringing one
in takes hundreds of small copies, and a file is read in the step that needs it. Needed: one pool, one copy, files read ahead; and
no adapter on embeddings or the LM head, which ours never adapt. Still fits while layers pass `lora_a_stacked` and
`lora_b_stacked` to the kernels as they are, and each step's adapters and token map come by `set_active_adapters` (see
`contract.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from engine_patch.errors import PreftError
from engine_patch.kernels.step import NO_RUNS, Runs
from engine_patch.patching import put, replace
from engine_patch.pool.layers import EngineLayers, kernels_of
from engine_patch.pool.limits import Limits, with_room_ahead
from engine_patch.pool.mlp import replace_mlps
from engine_patch.pool.tiers import AdapterTiers, parse
from engine_patch.store.layout import PAGE_BYTES

DEFAULT_HOST_BYTES = 1 << 30


def patch() -> None:
    """Replace what upstream does with adapters in a worker."""
    from vllm.lora import model_manager
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.column_parallel_linear import (
        MergedColumnParallelLinearWithLoRA,
        MergedQKVParallelLinearWithLoRA,
    )
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.v1.worker.worker_base import WorkerBase

    for layer in (BaseLinearLayerWithLoRA, MergedColumnParallelLinearWithLoRA, MergedQKVParallelLinearWithLoRA):
        put(layer, "create_lora_weights", create_lora_weights)
    replace(model_manager, "get_supported_lora_modules", make_supported_modules)
    replace(LRUCacheWorkerLoRAManager, "create_lora_manager", make_create)
    methods = (
        set_active_adapters,
        add_adapter,
        add_dummy_lora,
        remove_adapter,
        remove_all_adapters,
        list_adapters,
        pin_adapter,
    )
    for ours in methods:
        put(LRUCacheWorkerLoRAManager, ours.__name__, ours)
    put(WorkerBase, "preft_want", want)
    put(WorkerBase, "preft_count", count)
    put(WorkerBase, "preft_limits", tell_limits)


def create_lora_weights(self: Any, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
    """No arrays: `attach` gives the layer the pool. What else the layer reads is set as upstream does."""
    self.lora_config = lora_config
    self.lora_a_stacked = self.lora_b_stacked = ()
    if self.n_slices == 1:
        self.output_slices = (self.output_size,)


def make_supported_modules(upstream: Any) -> Any:
    """Only linear layers are wrapped: arrays for an LM head of 128,000 rows would take memory that no adapter uses."""

    def get_supported_lora_modules(model: Any) -> list[str]:
        embeddings = {name for module in model.modules() for name in (getattr(module, "embedding_modules", None) or ())}
        return [name for name in upstream(model) if name not in embeddings]

    return get_supported_lora_modules


def make_create(upstream: Any) -> Any:
    """Makes the tiers once the layers are wrapped."""

    def create_lora_manager(self: Any, model: Any, vllm_config: Any) -> Any:
        if vllm_config.parallel_config.use_ubatching:
            raise PreftError("adapters are not served with dual-batch overlap or microbatches: leave them off")
        wrapped = upstream(self, model, vllm_config)
        config, inner = self.lora_config, self._adapter_manager
        extra = vllm_config.additional_config
        options = extra.get("preft", {}) if isinstance(extra, dict) else {}
        layers = EngineLayers.of(inner, bool(options.get("residual_stream")))
        limits = limits_of(layers, config.max_lora_rank, inner.lora_slots, config.lora_dtype.itemsize, options)
        self.preft = AdapterTiers(layers, limits, inner.lora_slots, config.lora_dtype, self.device)
        self.preft_kernels = kernels_of(inner)
        self.preft_ids, self.preft_dummies = {}, {}
        attach(layers, self.preft.device.pool, self.preft.device.table)
        if self.device.type == "cpu":
            from engine_patch.kernels.cpu import bypass

            for layer in layers.linear:
                bypass(layer)
        else:
            replace_mlps(inner.model)
        return wrapped

    return create_lora_manager


def limits_of(layers: EngineLayers, max_rank: int, num_slots: int, itemsize: int, options: dict[str, Any]) -> Limits:
    """What a worker can serve. Sizes that are not given: room for as many of the largest adapters as there are slots, and ahead.

    Args:
        layers: what the engine can adapt.
        max_rank: the largest rank that its kernels take.
        num_slots: adapters of one step.
        itemsize: bytes of an element on the device.
        options: `additional_config["preft"]`: `gpu_pool_bytes` and `host_pool_bytes`.
    """
    unlimited = 1 << 62
    limits = Limits(
        base=layers.base.to_dict(),
        max_rank=max_rank,
        modules=layers.sizes(),
        itemsize=itemsize,
        device_bytes=unlimited,
        host_bytes=unlimited,
    )
    room = num_slots * limits.largest_pages() * PAGE_BYTES
    device = options.get("gpu_pool_bytes") or with_room_ahead(room)
    host = options.get("host_pool_bytes") or max(room, DEFAULT_HOST_BYTES)
    return limits.model_copy(update={"device_bytes": int(device), "host_bytes": int(host)})


def attach(layers: EngineLayers, pool: torch.Tensor, table: torch.Tensor) -> None:
    """Give each layer what its kernels need: the pool, its rows of the table, and where its slices lie.

    Args:
        layers: all wrapped layers.
        pool: `[num_elements]`.
        table: `[kinds, num_slices, 4]`.
    """
    first = 0
    for layer, parts in layers.layers:
        starts = [sum(layer.output_slices[:index]) for index in range(len(parts))]
        slices = torch.tensor(
            list(zip(starts, layer.output_slices, strict=True)), dtype=torch.int32, device=pool.device
        )
        own = table[:, first : first + len(parts)]
        layer.lora_a_stacked, layer.lora_b_stacked = layer.punica_wrapper.adopt(pool, own, slices)
        first += len(parts)


def set_active_adapters(self: Any, requests: Any, mapping: Any) -> None:
    """Have a step's adapters on the device, and tell its kernels where, and which tokens use them.

    Args:
        self: vLLM's `LRUCacheWorkerLoRAManager`.
        requests: `LoRARequest`s of the adapters that act in the step.
        mapping: vLLM's `LoRAMapping`; its `index_mapping` is what `Runs.of` takes.
    """
    if mapping.type.name != "LANGUAGE":
        return  # the towers of a multimodal model, which are not adapted
    active = {request.lora_int_id: request for request in requests if request}
    slots = self._adapter_manager.lora_slots
    if len(active) > slots:
        raise RuntimeError(f"a step with {len(active)} adapters, and there are {slots} slots")
    if active.keys() & self.preft_dummies.keys():
        places = {id_: self.preft_dummies[id_] for id_ in active}
    else:
        found = self.preft.activate([request.lora_path for request in active.values()])
        places = dict(zip(active, found, strict=True))
        self.preft_ids |= {id_: parse(request.lora_path).digest for id_, request in active.items()}
    self.preft_kernels.begin_step(Runs.of(mapping.index_mapping), places)


def add_adapter(self: Any, lora_request: Any) -> bool:
    """Have an adapter in host memory. Raises PreftError if it cannot be loaded."""
    ref = parse(lora_request.lora_path)
    if ref.digest not in self.preft.device.adapters:
        self.preft.load(ref)
    self.preft_ids[lora_request.lora_int_id] = ref.digest
    return True


def add_dummy_lora(self: Any, lora_request: Any, rank: int) -> bool:
    """Warm-up and graph capture run with these: all read zeros from the pool, which is still empty."""
    self.preft_dummies[lora_request.lora_int_id] = self.preft.warm_up(rank)
    return True


def remove_adapter(self: Any, adapter_id: int) -> bool:
    """Drop an adapter; a request that needs it has it loaded again."""
    digest = self.preft_ids.pop(adapter_id, None)
    return digest is not None and self.preft.forget(digest)


def remove_all_adapters(self: Any) -> None:
    """Drop all adapters, those of the warm-up too: vLLM calls it after its first run, and then captures graphs."""
    self.preft.host.settle()
    self.preft_dummies.clear()
    for adapter_id in list(self.preft_ids):
        self.remove_adapter(adapter_id)
    self.preft.device.clear_table()
    self.preft_kernels.begin_step(NO_RUNS, {})
    self._adapter_manager.remove_all_adapters()


def list_adapters(self: Any) -> set[int]:
    """Ids of the adapters in host or device memory."""
    here = {*self.preft.host.adapters, *self.preft.device.adapters}
    return {adapter_id for adapter_id, digest in self.preft_ids.items() if digest in here}


def pin_adapter(self: Any, adapter_id: int) -> bool:
    """Refused: an adapter that is used stays by itself."""
    raise PreftError("adapters are not pinned: those that requests use stay in memory, others as long as there is room")


def want(worker: Any, running: list[str], waiting: list[str], patience: float) -> dict[str, str]:
    """`AdapterTiers.want` of a worker, for RPC."""
    found: dict[str, str] = worker.model_runner.lora_manager.preft.want(running, waiting, patience)
    return found


def count(worker: Any) -> dict[str, Any]:
    """`PoolCounters` of a worker as plain data, for RPC."""
    counters: dict[str, Any] = worker.model_runner.lora_manager.preft.count().model_dump()
    return counters


def tell_limits(worker: Any) -> dict[str, Any]:
    """`Limits` of a worker as plain data, for RPC."""
    limits: dict[str, Any] = worker.model_runner.lora_manager.preft.limits.model_dump()
    return limits
