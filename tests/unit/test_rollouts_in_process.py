"""Rollouts from an engine in this process, without one: what is refused, and what is said when it fails."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from preft_cli.errors import UserError
from preft_cli.rl.rollout import Rollout, Sampling
from preft_cli.rl.rollouts.in_process import InProcessRollouts, read_outputs

SAMPLING = Sampling(max_tokens=5, temperature=0.6)


class FakeVLLMError(Exception):
    """`vllm.exceptions.VLLMError`, of which no built-in class is a parent."""


class FakeLLM:
    """`vllm.LLM`, as far as it is used here; `stopped` counts."""

    generate: Callable[..., Any] = staticmethod(
        lambda prompts, *_, **__: [SimpleNamespace(outputs=[output()])] * len(prompts)
    )

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.stopped = 0
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._shutdown))

    def _shutdown(self) -> None:
        self.stopped += 1


def output(tokens: tuple[int, ...] = (3, 4), reason: str | None = "stop", logprob: float = -0.5) -> Any:
    return SimpleNamespace(
        token_ids=list(tokens),
        finish_reason=reason,
        logprobs=[{token: SimpleNamespace(logprob=logprob)} for token in tokens],
    )


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The names of vLLM that the code imports."""
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": FakeLLM, "SamplingParams": SimpleNamespace},
        "vllm.inputs": {"TokensPrompt": dict},
        "vllm.exceptions": {"VLLMError": FakeVLLMError},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(LLM=FakeLLM)


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
    with pytest.raises(UserError, match=r"samples answers failed: no room\. Go on with preft train --resume"):
        rollouts(llm).generate([[1]], 1, SAMPLING, seed=1)


def test_prompts_that_the_engine_would_cut_are_refused(vllm: SimpleNamespace) -> None:
    here = rollouts(FakeLLM())
    here.generate([[1] * 11], 1, SAMPLING, seed=1)
    with pytest.raises(
        UserError, match=r"a prompt of 12 tokens and an answer of 5 .* than the 16 tokens of the engine"
    ):
        here.generate([[1], [1] * 12], 1, SAMPLING, seed=1)
