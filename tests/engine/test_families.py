"""DiReFT and LoRA on the other families whose residual stream is known, and on a declared one: random models of two layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.requests import lora_request
from engine_patch.store.file import write_adapter
from preft_cli.models import BaseModel
from preft_cli.models.modules import modules_of
from tests.engine.test_parity import TOLERANCE, generate, served_logprobs
from tests.reference import MaskedReference, random_adapter

pytestmark = pytest.mark.engine

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def random_model(kind: str, folder: Path) -> BaseModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    more = {"sliding_window": None} if kind == "mistral" else {}
    config = AutoConfig.for_model(
        kind,
        vocab_size=512,
        intermediate_size=128,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        **SIZES,
        **more,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return BaseModel(str(folder), folder)


def engine(base: BaseModel, **more: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(base.path),
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        block_size=32,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        skip_tokenizer_init=True,
        **more,
    )


@pytest.mark.parametrize(("kind", "declared"), [("qwen2", False), ("qwen3", False), ("mistral", True)])
def test_served_answers_equal_the_reference(kind: str, declared: bool, tmp_path: Path) -> None:
    """Mistral's residual stream is not known by itself: it is declared, as `model.residual_stream: true` does."""
    base = random_model(kind, tmp_path / "model")
    modules = modules_of(base, declared)
    assert bool(modules_of(base).streams) != declared
    reference = MaskedReference(base.path)
    adapters = [
        random_adapter(modules, base.fingerprint, seed=seed, rank=4, method=method, loud=2)
        for seed, method in enumerate(("direftp", "lorap+direftp", "direft"))
    ]
    files = [tmp_path / f"{index}.preft" for index in range(3)]
    for file, adapter in zip(files, adapters, strict=True):
        write_adapter(file, adapter)
    prompts = [[(7 * i + 3 * length) % 512 for i in range(length)] for length in (1, 2, 31, 32, 50, 100, 130)]
    which = [None if index == 6 else index % 3 for index in range(7)]
    llm = engine(base, additional_config={"preft": {"residual_stream": True}} if declared else {})
    try:
        answers = generate(llm, prompts, [None if one is None else lora_request(str(one), files[one]) for one in which])
    finally:
        llm.llm_engine.engine_core.shutdown()
    for prompt, one, answer in zip(prompts, which, answers, strict=True):
        adapter, tokens = None if one is None else adapters[one], list(answer.token_ids)
        right = reference.logprobs(prompt, tokens, adapter, len(prompt) + len(tokens) if one == 2 else None)
        assert (served_logprobs(answer) - right).abs().max() < TOLERANCE
        if one == 0:
            assert (served_logprobs(answer) - reference.logprobs(prompt, tokens, None)).abs().max() > 100 * TOLERANCE
