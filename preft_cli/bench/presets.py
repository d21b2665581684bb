"""Benchmarks with a name: `preft bench --preset ci`. A preset lies over the config file and under `--set`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from preft_cli.config.near import near_words
from preft_cli.config.overrides import Override
from preft_cli.errors import UserError


@dataclass(frozen=True)
class Preset:
    """Keys of the config, by their full names, and one line about them."""

    description: str
    keys: dict[str, Any]


# Each preset names every key that moves its numbers, also where it is the default: a config file must not bend a
# benchmark that people compare by its name.
_ALIKE: dict[str, Any] = {
    "project.seed": 0,
    "model.residual_stream": False,
    "bench.mode": "offline",
    "bench.prompts": None,
    "bench.enable_prefix_caching": False,
    "bench.lora_slots": None,
    "bench.lora_graphs": "both",
    "bench.engines": "auto",
    "serve.gpu_memory_utilization": None,
    "bench.repeats": 3,
}
_PAPER: dict[str, Any] = _ALIKE | {
    "bench.arms": ["base", "lora", "lorap", "direftp"],
    "bench.num_adapters": 512,
    "bench.adapter_choice": "round-robin",
    "bench.rank": 8,
    "bench.num_requests": 512,
    "bench.prompt_len": 256,
    "bench.output_len": 256,
    "bench.max_num_seqs": 512,
    "bench.gpu_slots": 64,  # as many prompts as fit into vLLM's step of 16,384 tokens
    "bench.dtype": "bfloat16",
    "serve.tensor_parallel_size": 1,
}

PRESETS: dict[str, Preset] = {
    "ci": Preset(
        "a small model on two CPU cores in about two minutes, every arm once: does it still work, and about how fast",
        _ALIKE
        | {
            "model.base": "smollm2-135m",
            "bench.arms": ["base", "lora", "lorap", "direftp", "direft"],
            "bench.num_adapters": 4,
            "bench.adapter_choice": "round-robin",
            "bench.gpu_slots": 4,
            "bench.rank": 8,
            "bench.num_requests": 8,
            "bench.prompt_len": 32,
            "bench.output_len": 8,
            "bench.max_num_seqs": 8,
            "bench.repeats": 2,
            "bench.dtype": "auto",
            "serve.tensor_parallel_size": 1,
        },
    ),
    "paper-0.5b": Preset(
        "512 adapters on the shape of Qwen 2.5 0.5B, as in PreFT (arXiv 2605.14217); lengths and slots are our choice",
        _PAPER | {"model.base": "random:qwen2.5-0.5b"},
    ),
    "paper-8b": Preset(
        "the same on the shape of Llama 3.1 8B",
        # So much that multi-LoRA with all of its slots lives beside the base engine on a GPU of 141 GB.
        _PAPER | {"model.base": "random:llama-3.1-8b", "serve.gpu_memory_utilization": 0.95},
    ),
    "paper-70b": Preset(
        "the same on the shape of Llama 3.1 70B, on two GPUs",
        _PAPER | {"model.base": "random:llama-3.1-70b", "serve.tensor_parallel_size": 2},
    ),
    "s-lora": Preset(
        "like S-LoRA (arXiv 2311.03285): ranks 8 to 64, lengths even in 8 to 512, popularity of adapters by a power law; "
        "unlike it: Llama 3.1 8B, all linear layers, all requests at once",
        _PAPER
        | {
            "model.base": "random:llama-3.1-8b",
            "bench.num_adapters": 100,
            "bench.adapter_choice": "zipf",
            "bench.zipf_exponent": 1.0,
            "bench.rank": [8, 16, 32, 64],
            "bench.prompt_len": [8, 512],
            "bench.output_len": [8, 512],
            "bench.max_num_seqs": 256,
            "bench.gpu_slots": 32,
        },
    ),
}


def overrides(name: str | None) -> list[Override]:
    """What the preset sets; its origin in errors is `--preset NAME`. None sets nothing.

    Raises:
        UserError: there is no such preset. Exit code 2.
    """
    if name is None:
        return []
    if name not in PRESETS:
        near = near_words(name, list(PRESETS))
        meant = f" (did you mean {near}?)" if near else ""
        known = "".join(f"\n  {known:11} {preset.description}" for known, preset in PRESETS.items())
        raise UserError(f"--preset {name}: there is no such preset{meant}; there are:{known}", 2)
    return [Override(tuple(key.split(".")), value, f"--preset {name}") for key, value in PRESETS[name].keys.items()]
