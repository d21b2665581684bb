"""Engine settings and ways to ask under which the prompt rule is not proved are refused."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patch import patching
from engine_patch.errors import PreftError
from engine_patch.plugin import why_inactive
from engine_patch.proved import guard, refuse_unproved
from engine_patch.status import EVERYWHERE, RUNNERS, ProcessStatus, ask, core_status, require_live, worker_status

PROVED: dict[str, Any] = {
    "speculative_config": None,
    "kv_transfer_config": None,
    "ec_transfer_config": None,
    "use_v2_model_runner": False,
    "cache_config.kv_offloading_size": None,
    "cache_config.kv_sharing_fast_prefill": False,
    "cache_config.cache_dtype": "auto",
    "offload_config.uva.cpu_offload_gb": 0,
    "offload_config.prefetch.offload_group_size": 0,
    "weight_transfer_config": None,
    "watermark_config": None,
    "parallel_config.pipeline_parallel_size": 1,
    "parallel_config.data_parallel_size": 1,
    "parallel_config.prefill_context_parallel_size": 1,
    "parallel_config.decode_context_parallel_size": 1,
    "parallel_config.enable_expert_parallel": False,
    "parallel_config.use_ubatching": False,
    "parallel_config._api_process_count": 1,
    "model_config.enable_prompt_embeds": False,
    "model_config.quantization": None,
    "model_config.is_multimodal_model": False,
    "model_config.is_encoder_decoder": False,
    "model_config.runner_type": "generate",
    "model_config.use_mla": False,
    "model_config.is_moe": False,
    "model_config.is_hybrid": False,
    "model_config.is_attention_free": False,
    "model_config.enable_sleep_mode": False,
    "model_config.is_diffusion": False,
    "model_config.get_sliding_window": lambda: None,
    "model_config.dtype": "bfloat16",
    "lora_config.lora_dtype": "bfloat16",
    "scheduler_config.scheduler_cls": None,
    "lora_config.fully_sharded_loras": False,
    "lora_config.specialize_active_lora": False,
    "device_config.device_type": "cpu",
}


CORE = SimpleNamespace(
    vllm_config=SimpleNamespace(lora_config=object()), scheduler=SimpleNamespace(preft_gate=object())
)
"""An engine core whose scheduler has its gate."""


def settings(changed: dict[str, Any]) -> Any:
    """What `unproved` reads of a `VllmConfig`."""
    config = SimpleNamespace()
    for path, value in (PROVED | changed).items():
        *parents, name = path.split(".")
        owner = config
        for parent in parents:
            if not hasattr(owner, parent):
                setattr(owner, parent, SimpleNamespace())
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return config


@pytest.mark.parametrize("changed", [{}, {"use_v2_model_runner": True, "device_config.device_type": "cuda"}])
def test_the_proved_settings_pass(changed: dict[str, Any]) -> None:
    refuse_unproved(settings(changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"cache_config.kv_offloading_size": 4.0}, "KV offloading"),
        ({"ec_transfer_config": object()}, "encoder cache connector"),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config.data_parallel_size": 2}, "data parallelism"),
        ({"parallel_config.decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config.prefill_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config.enable_expert_parallel": True}, "expert parallelism"),
        ({"parallel_config.use_ubatching": True}, "dual-batch overlap"),
        ({"cache_config.cache_dtype": "fp8"}, "a quantised KV cache"),
        ({"offload_config.uva.cpu_offload_gb": 4}, "weight offloading"),
        ({"offload_config.prefetch.offload_group_size": 2}, "weight offloading"),
        ({"weight_transfer_config": object()}, "weight transfer"),
        ({"watermark_config": object()}, "watermarking"),
        ({"model_config.is_diffusion": True}, "a diffusion language model"),
        ({"model_config.get_sliding_window": lambda: 4096}, "sliding-window attention"),
        ({"model_config.is_attention_free": True}, "attention-free"),
        ({"lora_config.lora_dtype": "float16"}, "a lora_dtype other than the model's"),
        ({"parallel_config._api_process_count": 2}, "several API servers"),
        ({"model_config.enable_prompt_embeds": True}, "prompt embeddings"),
        ({"model_config.quantization": "fp8"}, "a quantised base model"),
        ({"model_config.is_multimodal_model": True}, "a multimodal model"),
        ({"model_config.is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_config.runner_type": "pooling"}, "pooling model"),
        ({"model_config.use_mla": True}, "MLA"),
        ({"model_config.is_moe": True}, "mixture of experts"),
        ({"model_config.is_hybrid": True}, "Mamba"),
        ({"model_config.enable_sleep_mode": True}, "sleep mode"),
        ({"cache_config.kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ({"scheduler_config.scheduler_cls": "mine.Scheduler"}, "a scheduler class of its own"),
        ({"lora_config.fully_sharded_loras": True}, "fully_sharded_loras"),
        ({"lora_config.specialize_active_lora": True}, "specialize_active_lora"),
        ({"device_config.device_type": "cuda"}, "Model Runner V1 on a GPU"),
        ({"use_v2_model_runner": True}, "Model Runner V2 on a CPU"),
    ],
)
def test_each_unproved_setting_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PreftError, match=message):
        refuse_unproved(settings(changed))


def test_a_second_cuda_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LORA_ENABLE_DUAL_STREAM", "1")
    with pytest.raises(PreftError, match="VLLM_LORA_ENABLE_DUAL_STREAM"):
        refuse_unproved(settings({}))


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [None, one], lambda one: (one,)])
def test_a_guarded_method_refuses_prefill_only_adapters_alone(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "ledger", {})

    class Engine:
        def search(self, prompt: str, lora_request: Any = None) -> str:
            return prompt

    guard(Engine, "search", "beam search")

    def ask(path: str) -> str:
        request = SimpleNamespace(lora_path=path)
        return Engine().search("x", lora_request=wrap(request))

    assert Engine().search("x") == ask("/peft") == ask("/a.preft#preft=lora:ab") == "x"
    with pytest.raises(PreftError, match="beam search is not possible with a prefill-only adapter"):
        ask("/a.preft#preft=lorap:ab")


def said(module: str) -> ProcessStatus:
    """What a worker says whose runner is of `module`."""
    worker = SimpleNamespace(model_runner=type("Runner", (), {"__module__": module})())
    return ProcessStatus.model_validate(worker_status(worker))


@pytest.mark.parametrize("module", RUNNERS)
def test_a_worker_is_live_only_with_every_patch_of_its_runner(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    required = [*EVERYWHERE, *RUNNERS[module]]
    monkeypatch.setattr(patching, "ledger", required)
    require_live([said(module)])
    with pytest.raises(PreftError, match=r"\(mine\.runner\.Runner\) .*missing: support for this model runner"):
        require_live([said(module), said("mine.runner")])
    for missing in required:
        monkeypatch.setattr(patching, "ledger", [name for name in required if name != missing])
        with pytest.raises(PreftError, match=re.escape(f"missing: {missing}")):
            require_live([said(module)])


def test_the_engine_core_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "ledger", [name for name in EVERYWHERE if "schedule" not in name])
    with pytest.raises(PreftError, match=r"engine core\) runs without .*Scheduler\.schedule"):
        require_live([ProcessStatus.model_validate(core_status(CORE))])


def test_a_scheduler_without_its_gate_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would schedule requests before their adapters have arrived; the replacements alone do not tell."""
    monkeypatch.setattr(patching, "ledger", EVERYWHERE)
    bare = SimpleNamespace(vllm_config=CORE.vllm_config, scheduler=SimpleNamespace())
    require_live([ProcessStatus.model_validate(core_status(CORE))])
    with pytest.raises(PreftError, match="missing: the scheduler's AdapterGate"):
        require_live([ProcessStatus.model_validate(core_status(bare))])


class Client:
    """An `AsyncLLM` whose engine core answers, or lacks the plugin."""

    def __init__(self, error: Exception | None = None) -> None:
        self.engine_core, self._error = self, error

    async def call_utility_async(self, method: str) -> Any:
        if self._error:
            raise self._error
        return core_status(CORE)

    async def collective_rpc(self, method: str) -> list[Any]:
        return [worker_status(SimpleNamespace(model_runner=None))]


def test_all_processes_answer_or_none_counts() -> None:
    assert [status.role for status in asyncio.run(ask(Client()))] == ["engine core", "builtins.NoneType"]
    with pytest.raises(PreftError, match="does not answer whether the prefill-only rule is live: no preft_status"):
        asyncio.run(ask(Client(AttributeError("no preft_status"))))


def test_no_answer_is_not_live() -> None:
    with pytest.raises(PreftError, match="no worker answered"):
        require_live([])


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("PREFT_DISABLE", "1", "PREFT_DISABLE is set"),
        ("VLLM_PLUGINS", "other", "VLLM_PLUGINS=other leaves preft out"),
        ("VLLM_PLUGINS", "other,preft", None),
    ],
)
def test_a_plugin_that_would_not_be_loaded_is_known_beforehand(
    variable: str, value: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert why_inactive() == reason
