"""vLLM's own adapter manager and loader, without our plugin and without an engine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from engine_patch import plugin
from tests.benchmarks.material import Shape

MAX_TOKENS = 256
"""Of a step: sizes small buffers of the kernels, which are not run here."""


@contextmanager
def distributed() -> Iterator[Any]:
    """vLLM's state of one process that computes everything; yields its config. Once in a process."""
    os.environ["PREFT_DISABLE"] = "1"
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    config = VllmConfig()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel()
        try:
            yield config
        finally:
            cleanup_dist_env_and_memory()


class Stock:
    """vLLM's `LRUCacheLoRAModelManager` around the linear layers of a shape, and `WorkerLoRAManager._load_adapter`."""

    def __init__(self, shape: Shape, rank: int, slots: int, capacity: int, config: Any, device: torch.device) -> None:
        from vllm.config.lora import LoRAConfig
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.model_manager import LRUCacheLoRAModelManager

        if plugin.registered():
            raise RuntimeError("our plugin is in this process: this would not be the stock engine")
        self._lora = LoRAConfig(max_lora_rank=rank, max_loras=slots, max_cpu_loras=capacity, lora_dtype=torch.bfloat16)
        self.manager = LRUCacheLoRAModelManager(
            stand_in(shape.config, device), slots, MAX_TOKENS, shape.config.vocab_size, self._lora, device, config
        )
        linear = sum(not name.endswith("lm_head") for name in self.manager.modules)
        if linear != 4 * shape.config.num_hidden_layers:
            raise RuntimeError(f"vLLM wrapped {linear} layers, not four in each of the decoder's")
        # What `_load_adapter` reads of its `self`.
        self._worker = SimpleNamespace(
            _adapter_manager=self.manager,
            _lora_model_cls=LoRAModel,
            lora_config=self._lora,
            max_position_embeddings=shape.config.max_position_embeddings,
            vocab_size=shape.config.vocab_size,
        )

    def load(self, adapter_id: int, folder: Path) -> None:
        """As the stock worker does for a request: read, check, pack, pin; and register.

        Where vLLM pins nothing (CPU) tensors may still be views of a file that nobody has read: then they are copied.
        """
        from vllm.lora.request import LoRARequest
        from vllm.lora.worker_manager import WorkerLoRAManager
        from vllm.utils.torch_utils import PIN_MEMORY

        model = WorkerLoRAManager._load_adapter(self._worker, LoRARequest(folder.name, adapter_id, str(folder)))
        if not PIN_MEMORY:
            for weights in model.loras.values():
                weights.lora_a, weights.lora_b = weights.lora_a.clone(), weights.lora_b.clone()
        self.manager.add_adapter(model)

    def forget(self, adapter_id: int) -> None:
        """Drop it from host memory."""
        self.manager.remove_adapter(adapter_id)


def stand_in(config: Any, device: torch.device) -> nn.Module:
    """The linear layers of a Llama or Qwen decoder as vLLM builds them, with base weights of no size."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.models.interfaces import SupportsLoRA

    hidden, wide = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = hidden // heads

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = QKVParallelLinear(hidden, size, heads, kv_heads, bias=False)
            self.o_proj = RowParallelLinear(heads * size, hidden, bias=False)

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = MergedColumnParallelLinear(hidden, [wide, wide], bias=False)
            self.down_proj = RowParallelLinear(wide, hidden, bias=False)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn, self.mlp = Attention(), Mlp()

    class Model(nn.Module, SupportsLoRA):
        packed_modules_mapping = {  # noqa: RUF012 - as vLLM's models declare it
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }

        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.model = nn.Module()
            self.model.layers = nn.ModuleList(Layer() for _ in range(config.num_hidden_layers))

    with torch.device("meta"):
        model = Model()
    for module in model.modules():
        if hasattr(module, "weight"):  # vLLM puts an adapter's arrays where the layer's weight is
            module.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16, device=device), requires_grad=False)
    return model
