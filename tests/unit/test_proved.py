"""Engine settings and ways to ask under which the prompt rule is not proved are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patch import patching
from engine_patch.errors import PreftError
from engine_patch.plugin import why_inactive
from engine_patch.proved import guard, refuse_unproved
from engine_patch.status import REQUIRED, require_live, worker_status


def settings(**changed: Any) -> Any:
    found = {
        "prefix": False, "speculative_config": None, "kv_transfer_config": None, "pipeline": 1, "embeds": False, "v2": False
    } | changed  # fmt: skip
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=found["prefix"]),
        speculative_config=found["speculative_config"],
        kv_transfer_config=found["kv_transfer_config"],
        parallel_config=SimpleNamespace(pipeline_parallel_size=found["pipeline"]),
        model_config=SimpleNamespace(enable_prompt_embeds=found["embeds"]),
        use_v2_model_runner=found["v2"],
    )


def test_the_proved_settings_pass() -> None:
    refuse_unproved(settings())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prefix": True}, "prefix caching"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"pipeline": 2}, "pipeline parallelism"),
        ({"embeds": True}, "prompt embeddings"),
        ({"v2": True}, "Model Runner V2"),
    ],
)
def test_each_unproved_setting_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PreftError, match=message):
        refuse_unproved(settings(**changed))


@pytest.mark.parametrize("as_list", [False, True])
def test_a_guarded_method_refuses_prefill_only_adapters_alone(as_list: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "ledger", [])

    class Engine:
        def search(self, prompt: str, lora_request: Any = None) -> str:
            return prompt

    guard(Engine, "search", "beam search")

    def ask(path: str) -> str:
        request = SimpleNamespace(lora_path=path)
        return Engine().search("x", lora_request=[None, request] if as_list else request)

    assert Engine().search("x") == ask("/peft") == ask("/a.preft#preft=lora:ab") == "x"
    with pytest.raises(PreftError, match="beam search is not possible with a prefill-only adapter"):
        ask("/a.preft#preft=lorap:ab")


def worker(module: str) -> Any:
    return SimpleNamespace(model_runner=type("Runner", (), {"__module__": module})())


def test_a_worker_is_live_only_with_every_patch_and_the_runner_that_has_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = worker("vllm.v1.worker.cpu_model_runner")
    monkeypatch.setattr(patching, "ledger", list(REQUIRED))
    require_live([worker_status(cpu)])
    with pytest.raises(PreftError, match=r"worker 1 runs vllm\.v1\.worker\.gpu\.model_runner"):
        require_live([worker_status(cpu), worker_status(worker("vllm.v1.worker.gpu.model_runner"))])
    for missing in REQUIRED:
        monkeypatch.setattr(patching, "ledger", [name for name in REQUIRED if name != missing])
        with pytest.raises(PreftError, match="worker 0 runs"):
            require_live([worker_status(cpu)])


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
