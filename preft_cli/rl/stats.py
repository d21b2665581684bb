"""What one optimizer step of RL is described by."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Numbers of one optimizer step, over all processes. Field names are the keys of the row in metrics.jsonl."""

    step: int
    reward_mean: float
    reward_std: float
    """Over all answers of the step."""
    reward_low: float
    reward_high: float
    """The lowest and the highest reward of an answer."""
    rewards: Mapping[str, float]
    """The mean of each part of the reward, by its name, unweighted."""
    solved_share: float
    """Of the answers."""
    tied_share: float
    """Of the groups: those whose answers all earned the same, from which nothing can be learnt."""
    length_mean: float
    """Tokens of an answer."""
    cut_share: float
    """Of the answers: those that train.grpo.max_completion_length ended."""
    loss: float
    learning_rate: float
    grad_norm: float | None = None
    kl: float | None = None
    """From the base model, nats per token; None where train.grpo.beta is 0 and nobody computes it."""
    clip_ratio: float | None = None
    """Share of the tokens whose probability ratio was clipped."""
    entropy: float | None = None
    """Of the trained distribution, nats per token."""
    ratio_mean: float | None = None
    """Importance ratio (trainer over engine) on the first pass over the answers: about 1."""
    logprob_gap_mean: float | None = None
    logprob_gap_max: float | None = None
    """|log-probability in the trainer - in the engine| of sampled tokens, before the optimizer changes anything; nats."""
    generated_tokens: int
    seconds_generation: float
    seconds_rewards: float
    seconds_sync: float
    seconds_training: float
    seconds_total: float
    """All of the step; what is none of the above waits, copies or collates."""
    sync_bytes: int
    """0: no weights were sent in this step."""

    @property
    def tokens_per_s(self) -> float:
        """Sampled by the engine while it was sampling."""
        return self.generated_tokens / self.seconds_generation if self.seconds_generation > 0 else 0.0

    def row(self) -> dict[str, Any]:
        """For metrics.jsonl, which is JSON: what is no finite number is null there, and what is not known is left out."""
        known = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        known["tokens_per_s"] = round(self.tokens_per_s, 1)
        return {name: _plain(value) for name, value in known.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Sample:
    """One answer of a step, for people who must see why nothing is learnt."""

    prompt: str
    """As text; its end is shown."""
    answer: str
    reward: float | None
    right: str | None
    """The right answer, where there is one."""

    def text(self) -> str:
        """Four lines; line breaks and control characters within texts are written as \\n."""
        return "\n".join(
            [
                f"  the prompt ends:  {_quoted(self.prompt, start=0, end=160)}",
                f"  an answer:        {_quoted(self.answer)}",
                f"  its reward:       {'none' if self.reward is None else f'{self.reward:g}'}",
                *([f"  the right answer: {_quoted(self.right)}"] if self.right is not None else []),
            ]
        )


def _quoted(text: str, start: int = 160, end: int = 80) -> str:
    """On one line, with the middle left out of a long one."""
    if len(text) > start + end:
        text = f"{text[:start]} ... {text[len(text) - end :]}" if start else f"... {text[-end:]}"
    return json.dumps(text, ensure_ascii=False)
