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

from engine_patch import frontend, loading, proved
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.status import EVERYWHERE, RUNNERS
from tests.unit.scheduling import adapter
from tests.unit.test_proved import settings
from tests.unit.test_status import Engine

LORAP, LORA = adapter("a"), adapter("b", "lora")


@pytest.fixture(autouse=True)
def patched(upstream: None, tmp_path: Path) -> None:
    """What the plugin and the server replace, in this test alone."""
    proved.patch()
    loading.patch()
    frontend.patch(frontend.AdapterDirectory({}, BaseFingerprint(hidden_size=4), tmp_path))


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
        "vllm.lora.worker_manager.WorkerLoRAManager.__init__",
        "vllm.v1.core.block_pool.generate_block_hash_extra_keys",
        "vllm.v1.simple_kv_offload.manager.generate_block_hash_extra_keys",
        "vllm.entrypoints.generate.beam_search.offline.BeamSearchOfflineMixin.beam_search",
        "vllm.entrypoints.generate.beam_search.online.BeamSearchOnlineMixin.beam_search",
        "vllm.v1.engine.async_llm.AsyncLLM._add_streaming_input_request",
        "vllm.v1.request.Request.__init__",
        "vllm.v1.worker.worker_base.WorkerBase.preft_status",
        "vllm.v1.engine.core.EngineCore.preft_status",
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


def worker_manager(**changed: Any) -> Any:
    """The parts of a worker's manager that the patches look at; adapter 5 is loaded, with other content."""
    return SimpleNamespace(
        preft_vllm_config=settings(changed),
        preft_contents={5: ("lorap", "another")},
        _adapter_manager=SimpleNamespace(get_adapter=lambda id_: id_ == 5 or None),
    )


def test_a_worker_loads_nothing_that_its_engine_may_not_serve() -> None:
    from vllm.lora.worker_manager import WorkerLoRAManager

    with pytest.raises(PreftError, match="not served with pipeline parallelism"):
        WorkerLoRAManager._load_adapter(worker_manager(**{"parallel_config.pipeline_parallel_size": 2}), LORAP)


def test_a_worker_takes_no_id_for_another_content() -> None:
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    with pytest.raises(PreftError, match="adapter id 5 stands for another adapter's weights"):
        LRUCacheWorkerLoRAManager.add_adapter(worker_manager(), adapter("a", id_=5))


def test_an_adapter_that_fails_while_it_fills_its_slot_is_not_taken_for_loaded() -> None:
    """Upstream enters it first; the next request would be answered from a slot that is half filled."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    manager, removed = worker_manager(), []
    manager.list_adapters = set
    manager._adapter_manager.remove_adapter = removed.append
    manager._load_adapter = lambda request: 1 / 0
    with pytest.raises(ZeroDivisionError):
        LRUCacheWorkerLoRAManager.add_adapter(manager, LORAP)
    assert removed == [LORAP.lora_int_id]


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
