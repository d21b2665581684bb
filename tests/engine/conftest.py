"""Engines are started once for all tests of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_patch.adapter import Adapter
from engine_patch.store.file import write_adapter
from preft_cli.models import resolve
from preft_cli.models.modules import Modules, modules_of
from tests.reference import MaskedReference, random_adapter

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # a test looks into the worker, see test_prompt_mask
if "PYTEST_XDIST_WORKER" in os.environ:  # by itself vLLM binds the threads of every engine to the same cores
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real small model."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def reference(smollm2: Any) -> MaskedReference:
    return MaskedReference(smollm2.path)


@pytest.fixture(scope="session")
def adapters(smollm2: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Adapter]]:
    """Name -> (file, adapter), of each kind: two prefill-only ones of different rank, one on few modules, one on all tokens.

    The kinds are LoRA, DiReFT (`stream-...`) and adapters with both parts (`both-...`).
    """
    folder = tmp_path_factory.mktemp("store")
    modules, base = modules_of(smollm2), smollm2.fingerprint
    few = Modules(
        {name: shape for name, shape in modules.linear.items() if name.endswith(("q_proj", "down_proj"))},
        {name: shape for name, shape in modules.streams.items() if name.startswith("model.layers.1")},
    )
    made = {}
    for kind, prompt, everywhere in (
        ("", "lorap", "lora"),
        ("stream-", "direftp", "direft"),
        ("both-", "lorap+direftp", "lora+direft"),
    ):
        made[f"{kind}one"] = random_adapter(modules, base, seed=1, rank=8, method=prompt)
        made[f"{kind}two"] = random_adapter(modules, base, seed=2, rank=16, method=prompt)
        made[f"{kind}few"] = random_adapter(few, base, seed=3, rank=4, method=prompt, loud=3)
        made[f"{kind}everywhere"] = random_adapter(modules, base, seed=4, rank=8, method=everywhere, loud=0.3)
    files = {name: folder / f"{name}.preft" for name in made}
    for name, adapter in made.items():
        write_adapter(files[name], adapter)
    return {name: (files[name], made[name]) for name in made}


@pytest.fixture(scope="session")
def llm(smollm2: Any) -> Iterator[Any]:
    """SmolLM2 in float32 with the plugin, on the CPU engine; short of tokens a step and of KV blocks.

    Long prompts come in chunks, and requests are preempted and computed again, with chunks that straddle n.
    """
    from vllm import LLM

    engine = LLM(
        str(smollm2.path),
        dtype="float32",
        enable_lora=True,
        max_loras=4,
        max_lora_rank=16,
        max_model_len=512,
        max_num_seqs=20,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=24,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        disable_log_stats=False,
    )
    yield engine
    engine.llm_engine.engine_core.shutdown()
