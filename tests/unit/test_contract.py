"""A vLLM that is not the tested one is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine_patch import contract
from engine_patch.errors import PreftError

pytest.importorskip("vllm")


def test_the_installed_vllm_is_the_tested_one() -> None:
    """In a process of its own: where an engine ran before, the replaced symbols have our source."""
    code = "from engine_patch.contract import *; check(ALL_SYMBOLS)"
    checked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stderr


CHANGED = contract.Symbol("vllm.lora.lora_weights", "LoRALayerWeights.optimize", "0" * 16, "test")


@pytest.mark.parametrize(
    ("symbols", "differ"),
    [
        (
            (CHANGED,),
            r"these parts of it differ from what was tested: vllm\.lora\.lora_weights\.LoRALayerWeights\.optimize",
        ),
        ((), "no part that preft relies on differs, but nothing else was tested"),
    ],
)
def test_another_minor_version_is_refused_with_symbol_versions_and_remedy(
    symbols: tuple[contract.Symbol, ...], differ: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "installed_version", lambda: ("vllm", "0.33.1"))
    remedy = r"install vllm==0\.32\.\*, or set PREFT_DISABLE=1"
    with pytest.raises(PreftError, match=rf"tested with vLLM 0\.32, this is vllm 0\.33\.1; {differ}; {remedy}"):
        contract.check(symbols)


def test_the_plugin_refuses_it_in_every_process_that_vllm_starts() -> None:
    """As vLLM calls it: the error comes out of `register`, which vLLM does not swallow."""
    code = (
        "from engine_patch import contract, plugin; contract.installed_version = lambda: ('vllm', '0.33.1');"
        "from vllm.plugins import load_general_plugins; load_general_plugins()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "preft was tested with vLLM 0.32, this is vllm 0.33.1" in ended.stderr


def test_no_vllm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "installed_version", lambda: None)
    with pytest.raises(PreftError, match=r"vLLM is not installed: pip install 'preft\[cpu\]'"):
        contract.check(contract.ENGINE_SYMBOLS)


@pytest.mark.parametrize("name", ["LoRALayerWeights.optimize", "LoRALayerWeights.gone"])
def test_a_changed_or_missing_symbol_is_named(name: str) -> None:
    changed = contract.Symbol("vllm.lora.lora_weights", name, "0" * 16, "test")
    with pytest.raises(PreftError, match=rf"vllm\.lora\.lora_weights\.{name}.*install vllm"):
        contract.check((changed,))


def test_the_kill_switch_leaves_the_stock_engine_and_says_so() -> None:
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins();"
        "from engine_patch import patching, plugin; assert not patching.ledger and not plugin.registered()"
    )
    environment = {**os.environ, "PREFT_DISABLE": "1"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "PREFT_DISABLE is set: this is the stock engine" in ended.stdout + ended.stderr
