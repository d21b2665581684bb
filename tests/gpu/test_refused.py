"""On a GPU, whose model runner lacks the prompt rule, a prefill-only adapter is refused and never answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_patch.errors import PreftError
from engine_patch.requests import lora_request
from engine_patch.store.file import write_adapter
from preft_cli.models import resolve
from preft_cli.models.modules import linear_modules
from tests.reference import random_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and vLLM's CUDA build"),
]


def test_a_prefill_only_adapter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    base = resolve("smollm2-135m")
    write_adapter(tmp_path / "x.preft", random_adapter(linear_modules(base), base.fingerprint, seed=1))
    llm = LLM(str(base.path), enable_lora=True, enable_prefix_caching=False, max_model_len=512, enforce_eager=True)
    with pytest.raises(PreftError, match="Model Runner V2"):
        llm.generate("hello", lora_request=lora_request("x", tmp_path / "x.preft"))
