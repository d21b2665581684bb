"""Which held-out problems are solved: one greedy answer each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from preft_cli.console import progress
from preft_cli.rl.prepare import Asked
from preft_cli.rl.problem import Reward
from preft_cli.rl.rewards.score import score
from preft_cli.rl.rollout import Rollouts, Sampling

AT_ONCE = 128
"""Problems between two signs of progress."""


class HeldOutProblems:
    """Measures the adapter, or the base model, on the same problems, as often as asked."""

    def __init__(
        self,
        asked: Asked,
        rewards: Sequence[tuple[Reward, float]],
        rollouts: Rollouts,
        sampling: Sampling,
        tokenizer: Any,
    ) -> None:
        """`sampling`: as in training; only its limit and stop tokens count."""
        self.asked = asked
        self._rewards = rewards
        self._rollouts = rollouts
        self._greedy = Sampling(sampling.max_tokens, temperature=0.0, stop_ids=sampling.stop_ids)
        self._tokenizer = tokenizer

    def solved(self, what: str, *, adapted: bool = True) -> list[bool]:
        """By problem, whether it is solved; `what` is measured, for people.

        The weights must have been synchronised.
        """
        found: list[bool] = []
        prompts, problems = self.asked.prompts, self.asked.problems
        with progress(f"answering held-out problems: {what}", total=len(prompts), unit="problems") as bar:
            for start in range(0, len(prompts), AT_ONCE):
                part = slice(start, start + AT_ONCE)
                groups = self._rollouts.generate(prompts[part], 1, self._greedy, seed=0, adapted=adapted)
                texts = self._tokenizer.batch_decode([group[0].token_ids for group in groups], skip_special_tokens=True)
                found += score(problems[part], texts, self._rewards).solved
                bar.update(len(found), note=f"accuracy {sum(found) / len(found):.1%}")
        return found
