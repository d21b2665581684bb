"""The patches in vLLM's own classes, put there by the plugin: nothing is proved by a function that nobody calls."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_patch import frontend, proved
from engine_patch.directory import AdapterDirectory
from engine_patch.errors import PreftError
from engine_patch.manifest import Manifest
from engine_patch.pool import manager
from engine_patch.status import EVERYWHERE, RUNNERS
from tests.unit.scheduling import adapter
from tests.unit.test_proved import settings
from tests.unit.test_status import Engine

LORAP, LORA = adapter("a"), adapter("b", "lora")


@pytest.fixture(autouse=True)
def patched(upstream: None, tmp_path: Path) -> None:
    """What the plugin and the server replace, in this test alone."""
    proved.patch()
    manager.patch()
    frontend.patch(AdapterDirectory(Manifest(adapters={}, base={"hidden_size": 4}), tmp_path))


def test_all_of_it_is_registered() -> None:
    """In a process of its own, as vLLM does it."""
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins(); load_general_plugins();"
        "from engine_patch import patching; print('\\n'.join(patching.ledger))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    ledger = [line for line in said.stdout.splitlines() if line.startswith("vllm.")]
    assert len(ledger) == len(set(ledger))
    assert set(ledger) == {
        *EVERYWHERE,
        *RUNNERS["vllm.v1.worker.cpu_model_runner"],
        *(
            f"vllm.lora.worker_manager.LRUCacheWorkerLoRAManager.{name}"
            for name in ("add_adapter", "add_dummy_lora", "remove_adapter", "remove_all_adapters", "list_adapters")
        ),
        "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager.pin_adapter",
        "vllm.lora.model_manager.get_supported_lora_modules",
        "vllm.lora.layers.column_parallel_linear.MergedColumnParallelLinearWithLoRA.create_lora_weights",
        "vllm.lora.layers.column_parallel_linear.MergedQKVParallelLinearWithLoRA.create_lora_weights",
        "vllm.v1.core.block_pool.generate_block_hash_extra_keys",
        "vllm.v1.simple_kv_offload.manager.generate_block_hash_extra_keys",
        "vllm.entrypoints.generate.beam_search.offline.BeamSearchOfflineMixin.beam_search",
        "vllm.entrypoints.generate.beam_search.online.BeamSearchOnlineMixin.beam_search",
        "vllm.v1.engine.async_llm.AsyncLLM._add_streaming_input_request",
        "vllm.v1.request.Request.__init__",
        *(f"vllm.v1.worker.worker_base.WorkerBase.preft_{name}" for name in ("status", "want", "count", "limits")),
        "vllm.v1.engine.core.EngineCore.preft_status",
        "vllm.v1.engine.core.EngineCore.preft_in_use",
    }


@pytest.mark.parametrize(
    ("live", "changed", "message"),
    [
        ((True, False), {}, "runs without the prefill-only rule"),
        ((False, True), {}, "runs without the prefill-only rule"),
        ((), {}, "the engine is dead"),
        ((True, True), {"speculative_config": object()}, "not served with speculative decoding"),
    ],
)
def test_the_server_does_not_come_to_listen(live: tuple[bool, ...], changed: dict[str, Any], message: str) -> None:
    """vLLM awaits this before it opens its port."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    engine = Engine(*live)
    engine.vllm_config = settings(changed)
    with pytest.raises(PreftError, match=message):
        asyncio.run(OpenAIServingModels.init_static_loras(SimpleNamespace(engine_client=engine)))


def test_pinning_is_refused_in_words() -> None:
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    with pytest.raises(PreftError, match="adapters are not pinned"):
        LRUCacheWorkerLoRAManager.pin_adapter(SimpleNamespace(), 5)


def test_a_layer_has_no_arrays_of_its_own() -> None:
    from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA

    layer = SimpleNamespace(n_slices=1, output_size=12)
    RowParallelLinearWithLoRA.create_lora_weights(layer, 64, "config")
    assert layer.lora_a_stacked == layer.lora_b_stacked == ()
    assert (layer.output_slices, layer.lora_config) == ((12,), "config")


def test_embeddings_and_the_lm_head_are_not_wrapped() -> None:
    import torch
    from vllm.lora import model_manager

    model = torch.nn.Module()
    model.embedding_modules = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}
    assert model_manager.get_supported_lora_modules(model) == []


@pytest.mark.parametrize("asked", [LORAP, [None, LORAP]])
def test_beam_search_is_refused(asked: Any) -> None:
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin

    for mixin in (BeamSearchOfflineMixin, BeamSearchOnlineMixin):
        with pytest.raises(PreftError, match="beam search is not possible with a prefill-only adapter"):
            mixin.beam_search(object(), *[None] * required_arguments(mixin.beam_search), lora_request=asked)


def required_arguments(function: Any) -> int:
    """Of the method behind a guard, besides self and `lora_request`."""
    import inspect

    upstream = inspect.getclosurevars(function).nonlocals["upstream"]
    parameters = list(inspect.signature(upstream).parameters.values())[1:]
    return sum(p.default is p.empty and p.name != "lora_request" for p in parameters)


def test_a_resumable_request_is_refused_wherever_it_comes_from() -> None:
    """Every request of the engine core is made here."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    def request(lora_request: Any, resumable: bool) -> Any:
        return Request("r", [1], SamplingParams(), None, lora_request=lora_request, resumable=resumable)

    for fine in (request(LORAP, False), request(LORA, True), request(None, True)):
        assert fine.num_prompt_tokens == 1
    with pytest.raises(PreftError, match="a streaming-input session is not possible with a prefill-only adapter"):
        request(LORAP, True)
