"""What the prompt rule is proved with, and the refusal of everything else: never run in hope.

Each refusal is made where no caller can get around it: engine settings when an adapter is loaded into a worker (and once more
when a server starts), ways to ask that feed generated tokens back as a prompt when they are called.
"""

from __future__ import annotations

import inspect
from typing import Any

from engine_patch.errors import PreftError
from engine_patch.patching import replace
from engine_patch.ref import parse_ref


def unproved(vllm_config: Any) -> list[str]:
    """The engine's settings under which a prefill-only adapter might act on other tokens than the prompt's."""
    parallel = vllm_config.parallel_config
    found = {
        "prefix caching (set enable_prefix_caching=False): cached blocks are not told apart by whether the adapter acted"
        " on them": vllm_config.cache_config.enable_prefix_caching,
        "speculative decoding": vllm_config.speculative_config is not None,
        "a KV connector or KV offloading": vllm_config.kv_transfer_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "prompt embeddings": vllm_config.model_config.enable_prompt_embeds,
        "Model Runner V2, vLLM's default on a GPU (preft serves with vLLM's CPU build for now)": (
            vllm_config.use_v2_model_runner
        ),
    }
    return [name for name, present in found.items() if present]


def refuse_unproved(vllm_config: Any) -> None:
    """Raise PreftError if the engine's settings are not proved to keep the prompt rule; names all of them."""
    if reasons := unproved(vllm_config):
        raise PreftError(f"prefill-only adapters are not served with {'; nor with '.join(reasons)}")


def is_prefill_only(lora_request: Any) -> bool:
    """Whether a `LoRARequest` (or None) names a prefill-only adapter."""
    ref = lora_request and parse_ref(lora_request.lora_path)
    return bool(ref and ref.prefill_only)


def guard(owner: type, method: str, what: str) -> None:
    """Let `owner.method` refuse prefill-only adapters in its argument `lora_request` (one, or a list).

    Upstream sends the prompt and the tokens generated so far as a new prompt, so that n, the number of prompt tokens, grows
    and the adapter would act on generated tokens.
    """

    def make(upstream: Any) -> Any:
        signature = inspect.signature(upstream)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            asked = signature.bind(*args, **kwargs).arguments.get("lora_request")
            if any(is_prefill_only(request) for request in (asked if isinstance(asked, list) else [asked])):
                raise PreftError(
                    f"{what} is not possible with a prefill-only adapter: it would act on generated tokens"
                )
            return upstream(*args, **kwargs)

        return guarded

    replace(owner, method, make)


def patch() -> None:
    """Guard beam search, on and off line, and streaming-input sessions."""
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.v1.engine.async_llm import AsyncLLM

    guard(BeamSearchOfflineMixin, "beam_search", "beam search")
    guard(BeamSearchOnlineMixin, "beam_search", "beam search")
    guard(AsyncLLM, "_add_streaming_input_request", "a streaming-input session")
