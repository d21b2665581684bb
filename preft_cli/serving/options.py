"""Options of the vLLM server: which are ours to set, which are refused, and how a value becomes arguments."""

from __future__ import annotations

import json
from typing import Any

from preft_cli.errors import UserError

# vLLM option -> the key of preft.yaml that sets it.
OURS = {
    "model": "model.base",
    "served-model-name": "model.base",
    "chat-template": "model.chat_template",
    "host": "serve.host",
    "port": "serve.port",
    "dtype": "serve.dtype",
    "tensor-parallel-size": "serve.tensor_parallel_size",
    "data-parallel-size": "serve.data_parallel_size",
    "max-model-len": "serve.max_model_len",
    "max-num-seqs": "serve.max_num_seqs",
    "max-num-batched-tokens": "serve.max_num_batched_tokens",
    "gpu-memory-utilization": "serve.gpu_memory_utilization",
    "max-loras": "serve.gpu_slots",
    "max-cpu-loras": "serve.host_adapters",
    "max-lora-rank": "serve.max_lora_rank",
    "enable-lora": "serve.adapters",
    "lora-modules": "serve.adapters",
}

# vLLM option -> why a server of prefill-only adapters must not have it.
REFUSED = {
    "enable-prefix-caching": "cached blocks are not yet told apart by whether the adapter acted on them",
    "speculative-config": "not proved to keep the prompt rule",
    "kv-transfer-config": "not proved to keep the prompt rule",
    "pipeline-parallel-size": "not proved to keep the prompt rule",
    "enable-prompt-embeds": "a prompt without token ids has no number of prompt tokens to go by",
}


def option_name(key: str) -> str:
    """vLLM's own spelling: `max_num_seqs`, `--max-num-seqs` and `max-num-seqs` are one option."""
    return key.lstrip("-").replace("_", "-")


def check_options(vllm_args: dict[str, Any]) -> None:
    """Refuse options that have a key of their own, or that would break the prompt rule.

    Raises:
        UserError: names every such option and what to do.
    """
    problems = []
    for key in vllm_args:
        name = option_name(key)
        positive = name.removeprefix("no-")
        if name in OURS:
            problems.append(f"serve.vllm_args.{key}: set {OURS[name]} instead")
        elif name in REFUSED:
            problems.append(f"serve.vllm_args.{key}: refused, {REFUSED[name]}")
        elif name.startswith("no-") and positive in OURS:
            problems.append(f"serve.vllm_args.{key}: set {OURS[positive]} instead")
    if problems:
        raise UserError("\n".join(problems), exit_code=2)


def to_arguments(options: dict[str, Any]) -> list[str]:
    """Options as command line arguments: flags for booleans, JSON for mappings, nothing for None."""
    arguments: list[str] = []
    for key, value in options.items():
        name = option_name(key)
        if value is None:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, dict):
            arguments += [f"--{name}", json.dumps(value, sort_keys=True)]
        elif isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        else:
            arguments += [f"--{name}", str(value)]
    return arguments
