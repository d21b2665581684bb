"""What the engine in this process is started with."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine_patch.rule import is_prefill_only
from preft_cli.config.near import near_words
from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.rl.rollouts.start import LOGPROBS_MODE
from preft_cli.serving.adapters import LORA_RANKS
from preft_cli.serving.options import option_name
from preft_cli.training.foundation import Foundation

MEMORY_SHARE = 0.4
"""Of the GPU, for the engine: the trainer beside it needs the rest."""
MOST_AT_ONCE = 256
CPU = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 30}
"""Neither compiled nor warmed up: both take longer than a short run."""


def engine_args(config: PreftConfig, foundation: Foundation, answers: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: those of `serve` where they are set, else what suits rollouts."""
    serve, adapter = config.serve, config.adapter
    rank = max(adapter.rank, adapter.direft_rank or 0)
    ours: dict[str, Any] = {"residual_stream": config.model.residual_stream}
    if not is_prefill_only(adapter.method):
        ours["all_token_adapters"] = True
    if serve.gpu_pool:
        ours["gpu_pool_bytes"] = serve.gpu_pool
    return {
        "model": str(foundation.base.path),
        # The types of both must be the same, or log-probabilities differ by more than they must.
        "dtype": foundation.precision.name if serve.dtype == "auto" else serve.dtype,
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(limit for limit in LORA_RANKS if limit >= rank),
        "max_model_len": serve.max_model_len or foundation.limit,
        "max_num_seqs": serve.max_num_seqs or min(answers, MOST_AT_ONCE),
        "max_num_batched_tokens": serve.max_num_batched_tokens,
        "gpu_memory_utilization": serve.gpu_memory_utilization or MEMORY_SHARE,
        "enable_prefix_caching": True,
        "logprobs_mode": LOGPROBS_MODE,
        "generation_config": "vllm",  # no defaults of the model: `Sampling` says all
        "seed": config.project.seed,
        "additional_config": {"preft": ours},
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **(CPU if foundation.precision.device == "cpu" else {}),
        **{_field(key): value for key, value in serve.vllm_args.items()},
    }


def check_engine_options(vllm_args: dict[str, Any], known: Collection[str]) -> None:
    """Refuse options that this engine has not: those of vLLM's server alone, and misspelt ones.

    Args:
        vllm_args: `serve.vllm_args`, which has passed `check_options`.
        known: the fields of vLLM's `EngineArgs`.

    Raises:
        UserError: names every such option and what to do.
    """
    names = sorted(option_name(field) for field in known if not field.startswith("_"))
    problems = []
    for key, value in vllm_args.items():
        if _field(key) not in known:
            near = near_words(option_name(key), names)
            problems.append(
                f"serve.vllm_args.{key}: the engine in this process has no such option"
                f"{f'; did you mean {near}?' if near else ''} (options of the server alone go with train.grpo.rollout_url)"
            )
        elif _field(key) == "logprobs_mode" and value != LOGPROBS_MODE:
            problems.append(f"serve.vllm_args.{key}: training needs {LOGPROBS_MODE}; leave it out")
    if problems:
        raise UserError("\n".join(problems), exit_code=2)


def _field(key: str) -> str:
    """The field of `EngineArgs` that an option sets."""
    return option_name(key).replace("-", "_")
