"""The reward `math`: whether the final answer equals the right one, by math-verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from preft_cli.config.section import Section
from preft_cli.rl.problem import Problem
from preft_cli.rl.rewards.judge import Judge
from preft_cli.rl.rewards.needs import has_answer
from preft_cli.rl.text import behind_hashes, boxed, tagged

LONGEST = 20_000
"""Characters of an answer that are read, from its end: patterns on longer texts take minutes."""


class MathArgs(Section):
    """It has no settings."""


class MathReward:
    """1 if the answer in \\boxed{…}, behind ####, in <answer>…</answer> or, without these, the last one in the text is right."""

    name = "math"

    def __init__(self, args: MathArgs) -> None:
        self._judge = Judge("preft_cli.rl.rewards.math:judge")

    def __call__(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float | None]:
        """See `Reward`; None where the problem has no answer."""
        known = [has_answer(problem.record) for problem in problems]
        jobs = [
            (str(problem.answer), completion)
            for problem, completion, has in zip(problems, completions, known, strict=True)
            if has
        ]
        scores = iter(self._judge.scores(jobs))
        return [next(scores) if has else None for has in known]


def judge() -> Callable[[tuple[str, str]], float]:
    """In the judging process: what scores a right answer and a completion."""
    from math_verify import verify

    parsed = lru_cache(maxsize=10_000)(_parsed)

    def score(job: tuple[str, str]) -> float:
        right, completion = job
        # No timeouts of theirs: the process has its own, and both would use the one alarm clock there is.
        return float(verify(parsed(right, True), parsed(completion, False), timeout_seconds=None))

    return score


def _parsed(text: str, alone: bool) -> list[Any]:
    """The mathematics that `text` ends in.

    Args:
        alone: the text is nothing but an answer.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = text[-LONGEST:]
    final = boxed(text) or behind_hashes(text)
    if final is None and (alone or "</answer>" in text):
        final = tagged(text)
    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    if final is not None and (found := parse(f"\\boxed{{{_bare(final)}}}", configs[:1], parsing_timeout=None)):
        return list(found)
    return list(parse(text if final is None else final, configs, parsing_timeout=None))


def _bare(answer: str) -> str:
    """Without the signs around it: `$18$`, `\\(18\\)`, `$18`."""
    return answer.strip().removeprefix("\\(").removesuffix("\\)").strip("$").rstrip(".").strip()
