"""Rollouts from an engine in this process, without one: what is refused, and what is said when it fails."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from pydantic import TypeAdapter

from engine_patch.errors import PreftError
from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.rl.rollout import Rollout, Sampling
from preft_cli.rl.rollouts.in_process import InProcessRollouts, read_outputs

SAMPLING = Sampling(max_tokens=5, temperature=0.6)


class FakeVLLMError(Exception):
    """`vllm.exceptions.VLLMError`, of which no built-in class is a parent."""


class FakeLLM:
    """`vllm.LLM`, as far as it is used here."""

    made: ClassVar[list[FakeLLM]] = []
    refuses: ClassVar[BaseException | None] = None

    generate: Callable[..., Any] = staticmethod(
        lambda prompts, *_, **__: [SimpleNamespace(outputs=[output()])] * len(prompts)
    )

    def __init__(self, **arguments: Any) -> None:
        if self.refuses:
            raise self.refuses
        self.made.append(self)
        self.arguments = arguments
        self.stopped = 0
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._shutdown))

    def _shutdown(self) -> None:
        self.stopped += 1


@dataclass
class FakeEngineArgs:
    """`vllm.engine.arg_utils.EngineArgs`, with few of its fields."""

    model: str
    block_size: int
    enable_prefix_caching: bool
    logprobs_mode: str


def output(tokens: tuple[int, ...] = (3, 4), reason: str | None = "stop", logprob: float = -0.5) -> Any:
    return SimpleNamespace(
        token_ids=list(tokens),
        finish_reason=reason,
        logprobs=[{token: SimpleNamespace(logprob=logprob)} for token in tokens],
    )


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The names of vLLM that the code imports; `live` is what makes the adapter."""
    found = SimpleNamespace(live=lambda *_, **__: SimpleNamespace(request=None, close=lambda: None), cleaned=0)

    def cleanup() -> None:
        found.cleaned += 1

    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": FakeLLM, "SamplingParams": SimpleNamespace},
        "vllm.inputs": {"TokensPrompt": dict},
        "vllm.exceptions": {"VLLMError": FakeVLLMError},
        "vllm.engine.arg_utils": {"EngineArgs": FakeEngineArgs},
        "vllm.distributed.parallel_state": {"cleanup_dist_env_and_memory": cleanup},
        "engine_patch.live": {"LiveAdapter": lambda *args, **more: found.live(*args, **more)},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return found


def start(vllm_args: dict[str, Any] | None = None) -> InProcessRollouts:
    """An engine for a foundation of which little is read."""
    base = SimpleNamespace(path="the-base", fingerprint=None)
    foundation: Any = SimpleNamespace(base=base, limit=64, precision=SimpleNamespace(device="cpu", name="float32"))
    return InProcessRollouts(
        PreftConfig.model_validate({"serve": {"vllm_args": vllm_args or {}}}), foundation, answers=8
    )


def rollouts(llm: Any) -> InProcessRollouts:
    """Around an engine that runs."""
    made = object.__new__(InProcessRollouts)
    made._llm, made._adapter = llm, SimpleNamespace(request=None)
    made._on_cpu, made._max_model_len = True, 16
    return made


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (output(logprob=math.nan), "drew a token that has no probability"),
        (output(logprob=-math.inf), "drew a token that has no probability"),
        (output(reason="abort"), r"before it was whole \(abort\)"),
        (output(reason=None), r"before it was whole \(None\)"),
        (output(()), "gave 2 answers for 2, or not a log-probability for each token"),
        (SimpleNamespace(token_ids=[1], finish_reason="stop", logprobs=None), "no log-probability for some token"),
    ],
)
def test_answers_that_are_not_whole_are_refused(wrong: Any, message: str) -> None:
    assert read_outputs([output(), output((7,), "length")], 2) == [Rollout([3, 4], [-0.5, -0.5]), Rollout([7], [-0.5])]
    with pytest.raises(UserError, match=message):
        read_outputs([output(), wrong], 2)
    with pytest.raises(UserError, match="gave 1 answers for 2"):
        read_outputs([output()], 2)


@pytest.mark.parametrize("error", [FakeVLLMError("no room\nat all"), RuntimeError("no room"), ValueError("no room")])
def test_errors_of_the_engine_say_what_to_do(vllm: SimpleNamespace, error: Exception) -> None:
    llm = FakeLLM()
    assert rollouts(llm).generate([[1], [2]], 1, SAMPLING, seed=1) == [[Rollout([3, 4], [-0.5, -0.5])]] * 2

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    llm.generate = fail
    with pytest.raises(UserError, match=r"samples answers failed: no room\. If memory ran out, lower serve"):
        rollouts(llm).generate([[1]], 1, SAMPLING, seed=1)


def test_prompts_that_the_engine_would_cut_are_refused(vllm: SimpleNamespace) -> None:
    here = rollouts(FakeLLM())
    here.generate([[1] * 11], 1, SAMPLING, seed=1)
    with pytest.raises(
        UserError, match=r"a prompt of 12 tokens and an answer of 5 .* than the 16 tokens of the engine"
    ):
        here.generate([[1], [1] * 12], 1, SAMPLING, seed=1)


def test_options_of_the_engine_are_known_before_it_starts(vllm: SimpleNamespace) -> None:
    start({"block-size": 16, "logprobs-mode": "processed_logprobs"}).stop()
    assert FakeLLM.made.pop().arguments["block_size"] == 16
    with pytest.raises(UserError) as error:
        start({"foo-bar": 1, "--enable_prefix_cachin": True, "logprobs-mode": "raw_logprobs"})
    assert error.value.exit_code == 2
    first, second, third = str(error.value).splitlines()
    assert first.startswith("serve.vllm_args.foo-bar: the engine in this process has no such option (")
    assert "vllm_args.--enable_prefix_cachin: " in second
    assert "did you mean enable-prefix-caching?" in second
    assert "serve.vllm_args.logprobs-mode: training needs processed_logprobs" in third
    assert not FakeLLM.made


def test_what_the_engine_refuses_is_one_line(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="validation error") as invalid:
        TypeAdapter(FakeEngineArgs).validate_python({"model": "m", "block_size": "x"})
    for refusal, said in (
        (invalid.value, "block_size: Input should be a valid integer, unable to parse string as an integer"),
        (TypeError("'<' not supported\nbetween"), "'<' not supported"),
        (FakeVLLMError("no"), "no"),
        (AssertionError("Error in memory profiling. Initial free"), "Error in memory profiling. Initial free"),
    ):
        monkeypatch.setattr(FakeLLM, "refuses", refusal)
        with pytest.raises(UserError) as error:
            start()
        assert f"did not start: {said}. Its settings are those of serve and serve.vllm_args; serve.gpu" in str(
            error.value
        )
        assert "\n" not in str(error.value)
        assert ("kv-cache-memory-bytes" in str(error.value)) == isinstance(refusal, AssertionError)


@pytest.mark.parametrize(
    ("refusal", "raised"),
    [
        (PreftError("no pool"), UserError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (AssertionError("one of ours"), AssertionError),
    ],
)
def test_an_engine_without_its_adapter_is_stopped(
    vllm: SimpleNamespace, refusal: BaseException, raised: type[BaseException]
) -> None:
    def live(*_: Any, **__: Any) -> Any:
        raise refusal

    vllm.live = live
    with pytest.raises(raised):
        start()
    assert [llm.stopped for llm in FakeLLM.made] == [1]
    assert vllm.cleaned == 1
