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
    "max-cpu-loras": "serve.host_pool",
    "additional-config": "serve.gpu_pool and serve.host_pool",
    "max-lora-rank": "serve.max_lora_rank",
    "enable-lora": "serve.adapters",
    "lora-modules": "serve.adapters",
}

_UNPROVED = "not proved to keep the prompt rule"
_ONE_SERVER = "preft serve starts one API server that it watches on its host and port"

# vLLM option -> why a server of prefill-only adapters must not have it. The engine refuses what is unproved once more, by
# what the options came to mean (engine_patch/proved.py); here the message comes at once.
REFUSED = {
    "speculative-config": _UNPROVED,
    "spec-method": _UNPROVED,
    "spec-model": _UNPROVED,
    "spec-tokens": _UNPROVED,
    "kv-transfer-config": _UNPROVED,
    "kv-offloading-size": _UNPROVED,
    "kv-offloading-backend": _UNPROVED,
    "ec-transfer-config": _UNPROVED,
    "pipeline-parallel-size": _UNPROVED,
    "prefill-context-parallel-size": _UNPROVED,
    "decode-context-parallel-size": _UNPROVED,
    "enable-dbo": _UNPROVED,
    "ubatch-size": _UNPROVED,
    "enable-expert-parallel": _UNPROVED,
    "quantization": _UNPROVED,
    "enable-sleep-mode": _UNPROVED,
    "kv-sharing-fast-prefill": _UNPROVED,
    "kv-cache-dtype": _UNPROVED,
    "cpu-offload-gb": _UNPROVED,
    "weight-transfer-config": _UNPROVED,
    "lora-dtype": _UNPROVED,
    "scheduler-cls": _UNPROVED,
    "fully-sharded-loras": _UNPROVED,
    "specialize-active-lora": "vLLM 0.32 captures its graphs for another number of adapters than its kernels then count",
    "default-mm-loras": "adapters act on text; multimodal models are not proved to keep the prompt rule",
    "enable-tower-connector-lora": "adapters act on text; multimodal models are not proved to keep the prompt rule",
    "enable-prompt-embeds": "a prompt without token ids has no number of prompt tokens to go by",
    "config": "options from a second file would not be checked; write them here",
    "headless": _ONE_SERVER,
    "api-server-count": _ONE_SERVER,
    "uds": _ONE_SERVER,
    "ssl-keyfile": _ONE_SERVER + "; put a proxy in front of it for TLS",
    "ssl-certfile": _ONE_SERVER + "; put a proxy in front of it for TLS",
}


def option_name(key: str) -> str:
    """vLLM's own spelling: `max_num_seqs`, `--max-num-seqs` and `max-num-seqs` are one option."""
    return key.lstrip("-").replace("_", "-")


def check_options(vllm_args: dict[str, Any]) -> None:
    """Refuse options that have a key of their own, would break the prompt rule, or would be lost on the way.

    Raises:
        UserError: names every such option and what to do.
    """
    seen: dict[str, str] = {}
    problems = []
    for key, value in vllm_args.items():
        name = option_name(key)
        if problem := _problem(name, value) or (name in seen and f"the same option as {seen[name]}"):
            problems.append(f"serve.vllm_args.{key}: {problem}")
        seen[name] = key
    if problems:
        raise UserError("\n".join(problems), exit_code=2)


def _problem(name: str, value: Any) -> str | None:
    positive = name.removeprefix("no-")
    if ours := OURS.get(name) or OURS.get(positive):
        return f"set {ours} instead"
    if value is not False and (reason := REFUSED.get(name)):
        return f"refused, {reason}"
    if "." in name or "+" in name or "=" in name:
        return "give the option by its plain name, with a mapping as its value"
    if value is None:
        return "has no value; write true for a flag"
    return None


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
