"""A vLLM that is not the tested one is refused by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine_patch import contract
from engine_patch.errors import PreftError

pytest.importorskip("vllm")


def test_the_installed_vllm_is_the_tested_one() -> None:
    """In a process of its own: where an engine ran before, the replaced symbols have our source."""
    code = "from engine_patch.contract import *; check(ENGINE_SYMBOLS + SERVER_SYMBOLS)"
    checked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stderr


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "installed_version", lambda: ("vllm", "0.33.1"))
    with pytest.raises(PreftError, match=r"tested with vLLM 0\.32, this is vllm 0\.33\.1; install vllm==0\.32\.\*"):
        contract.check(contract.ENGINE_SYMBOLS)


def test_no_vllm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "installed_version", lambda: None)
    with pytest.raises(PreftError, match=r"vLLM is not installed: pip install 'preft\[cpu\]'"):
        contract.check(contract.ENGINE_SYMBOLS)


@pytest.mark.parametrize("name", ["LoRALayerWeights.optimize", "LoRALayerWeights.gone"])
def test_a_changed_or_missing_symbol_is_named(name: str) -> None:
    changed = contract.Symbol("vllm.lora.lora_weights", name, "0" * 16, "test")
    with pytest.raises(PreftError, match=rf"vllm\.lora\.lora_weights\.{name}.*install vllm"):
        contract.check((changed,))
