"""What the prompt rule is proved with, and the refusal of everything else: never run in hope.

Each refusal is made in the engine: its settings when a request with an adapter is scheduled (and once more when a server starts),
ways to ask that feed generated tokens back as a prompt when they are called.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from engine_patch.errors import PreftError
from engine_patch.patching import replace
from engine_patch.ref import is_prefill_only


def unproved(vllm_config: Any) -> list[str]:
    """The engine's settings under which nothing proves yet that a prefill-only adapter acts on the prompt alone.

    The README lists them, and the settings that are proved, each with its test.
    """
    parallel, model, lora = vllm_config.parallel_config, vllm_config.model_config, vllm_config.lora_config
    cache, offload = vllm_config.cache_config, vllm_config.offload_config
    on_cpu = vllm_config.device_config.device_type == "cpu"
    found = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "a KV connector or KV offloading": (
            vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None
        ),
        "an encoder cache connector": vllm_config.ec_transfer_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size > 1,
        "expert parallelism": parallel.enable_expert_parallel,
        "dual-batch overlap or microbatches": parallel.use_ubatching,
        "several API servers (each would number the adapters by itself)": parallel._api_process_count > 1,
        "prompt embeddings": model.enable_prompt_embeds,
        "a quantised base model": model.quantization is not None,
        "a multimodal model": model.is_multimodal_model,
        "an encoder-decoder or pooling model": model.is_encoder_decoder or model.runner_type != "generate",
        "multi-head latent attention (MLA)": model.use_mla,
        "mixture of experts": model.is_moe,
        "state space (Mamba) or attention-free layers": model.is_hybrid or model.is_attention_free,
        "sliding-window attention": model.get_sliding_window() is not None,
        "a diffusion language model": model.is_diffusion,
        "a quantised KV cache": cache.cache_dtype not in ("auto", "float16", "bfloat16"),
        "weight offloading": offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0,
        "weight transfer": vllm_config.weight_transfer_config is not None,
        "watermarking": vllm_config.watermark_config is not None,
        "sleep mode": model.enable_sleep_mode,
        "kv_sharing_fast_prefill": cache.kv_sharing_fast_prefill,
        "a scheduler class of its own": vllm_config.scheduler_config.scheduler_cls is not None,
        "a lora_dtype other than the model's": lora.lora_dtype not in (None, "auto", model.dtype),
        "fully_sharded_loras": lora.fully_sharded_loras,
        "specialize_active_lora": lora.specialize_active_lora,
        "VLLM_LORA_ENABLE_DUAL_STREAM": _asks_for_dual_stream(),
        "Model Runner V1 on a GPU (leave VLLM_USE_V2_MODEL_RUNNER unset)": (
            not vllm_config.use_v2_model_runner and not on_cpu
        ),
        "Model Runner V2 on a CPU (set VLLM_USE_V2_MODEL_RUNNER=0)": vllm_config.use_v2_model_runner and on_cpu,
    }
    return [name for name, present in found.items() if present]


def _asks_for_dual_stream() -> bool:
    """Whether the environment asks for LoRA on a second CUDA stream."""
    return os.environ.get("VLLM_LORA_ENABLE_DUAL_STREAM", "0") not in ("", "0")


def refuse_unproved(vllm_config: Any) -> None:
    """Raise PreftError if the engine's settings are not proved to keep the prompt rule; names all of them."""
    if reasons := unproved(vllm_config):
        raise PreftError(f"prefill-only adapters are not served with {'; nor with '.join(reasons)}")


def guard(owner: type, method: str, what: str) -> None:
    """Let `owner.method` refuse prefill-only adapters in its argument `lora_request` (one, or a sequence).

    Upstream sends the prompt and the tokens generated so far as a new prompt, so that n, the number of prompt tokens, grows
    and the adapter would act on generated tokens.
    """

    def make(upstream: Any) -> Any:
        signature = inspect.signature(upstream)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            asked = signature.bind(*args, **kwargs).arguments.get("lora_request")
            if any(is_prefill_only(request) for request in (asked if isinstance(asked, (list, tuple)) else [asked])):
                raise PreftError(
                    f"{what} is not possible with a prefill-only adapter: it would act on generated tokens"
                )
            return upstream(*args, **kwargs)

        return guarded

    replace(owner, method, make)


def refuse_resumable(request: Any) -> None:
    """A resumable request becomes a streaming-input session, whatever door it came in by; see `guard`."""
    if request.resumable and is_prefill_only(request.lora_request):
        raise PreftError(
            "a streaming-input session is not possible with a prefill-only adapter: it would act on generated tokens"
        )


def patch() -> None:
    """Guard beam search, on and off line, and streaming-input sessions, at the front and in the engine core."""
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.request import Request

    guard(BeamSearchOfflineMixin, "beam_search", "beam search")
    guard(BeamSearchOnlineMixin, "beam_search", "beam search")
    guard(AsyncLLM, "_add_streaming_input_request", "a streaming-input session")

    def make_init(upstream: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            upstream(self, *args, **kwargs)
            refuse_resumable(self)

        return __init__

    replace(Request, "__init__", make_init)
