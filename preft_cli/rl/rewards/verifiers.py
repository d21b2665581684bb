"""Before training: does the verifier know a right answer when it sees one? And what would one answer to all be worth?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from preft_cli.console import progress
from preft_cli.errors import UserError
from preft_cli.rl.problem import Problem, Problems, Reward

TRIED = 32
"""Problems whose own answers are judged."""
CONSTANTS = 20
"""Answers that are tried on every held-out problem."""
SHOWN = 300
"""Characters of a question, from its end."""
FORMS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "#### {}")
"""How a model would write its final answer."""
NO_CONSTANTS = ("code", "format")
"""Rewards for which answers of one problem are none of another, or that judge no answers."""


def check_verifiers(problems: Sequence[Problem], rewards: Sequence[tuple[Reward, float]]) -> list[str]:
    """Let the first reward judge the problems' own right answers.

    Returns:
        What the user must know: a share of them gets less than 1.

    Raises:
        UserError: not one of them gets 1. Training would see no signal, ever. (Of a function it is a remark only: it may ask
            for a form that nobody here knows.)
    """
    reward = rewards[0][0]
    if reward.name == "format":
        return []  # what its pattern matches cannot be told from the problem
    known = [(problem, forms) for problem in problems if (forms := right_answers(problem, reward.name))][:TRIED]
    if not known:
        return []
    with progress("checking the rewards on right answers"):
        best = _best(known, reward)
    failed = [(*one, value) for one, value in zip(known, best, strict=True) if value is None or value < 1]
    if not failed:
        return []
    text = _told(reward.name, len(known), failed)
    if len(failed) == len(known) and ":" not in reward.name:
        raise UserError(f"{text} No answer could ever be rewarded: check the answers and train.grpo.rewards.")
    return [text]


def right_answers(problem: Problem, reward: str) -> list[str]:
    """The problem's own answer in the forms in which a model would write it; empty if it has none."""
    record = problem.record
    if reward == "code":
        code = next((record[key] for key in ("canonical_solution", "code", "solution") if record.get(key)), None)
        if not isinstance(code, str):
            return []
        whole = code if "```" in code else f"```python\n{code}\n```"
        return [whole]
    if problem.answer is None:
        return []
    return [form.format(problem.answer.strip()) for form in FORMS]


def best_constant(problems: Problems, reward: Reward) -> tuple[str, float] | None:
    """The one answer that solves most held-out problems, of the most frequent ones to train on, and the share it solves.

    Returns:
        None if there are no such answers, or nothing is held out.
    """
    known = [problem for problem in problems.train if problem.answer is not None]
    if reward.name in NO_CONSTANTS or not known or not problems.held_out:
        return None
    write = _form(known[:TRIED], reward)
    frequent = [answer for answer, _ in Counter(str(problem.answer) for problem in known).most_common(CONSTANTS)]
    shares = {answer: _share(problems.held_out, write.format(answer), reward) for answer in frequent}
    best = max(frequent, key=lambda answer: shares[answer])
    return best, shares[best]


def _form(known: list[Problem], reward: Reward) -> str:
    """The way to write an answer that the reward understands most often."""
    return max(FORMS, key=lambda form: sum(_solved(known, [form.format(problem.answer) for problem in known], reward)))


def _share(problems: list[Problem], answer: str, reward: Reward) -> float:
    return sum(_solved(problems, [answer] * len(problems), reward)) / len(problems)


def _solved(problems: list[Problem], completions: list[str], reward: Reward) -> list[bool]:
    return [value is not None and value >= 1 for value in reward(problems, completions)]


def _best(known: list[tuple[Problem, list[str]]], reward: Reward) -> list[float | None]:
    """Of each problem, what its best form gets; None where the reward applies to none of them."""
    flat = [(problem, form) for problem, forms in known for form in forms]
    values = reward([problem for problem, _ in flat], [form for _, form in flat])
    given = iter(values)
    by_problem = [[value for value in [next(given) for _ in forms] if value is not None] for _, forms in known]
    return [max(values, default=None) for values in by_problem]


def _told(name: str, tried: int, failed: list[tuple[Problem, list[str], float | None]]) -> str:
    problem, forms, value = failed[0]
    nothing = sum(value is None for *_, value in failed)
    gives = "gives" if nothing < len(failed) else "returns None, as if it did not apply,"
    less = " less than 1" if nothing == 0 else " less than 1, or None," if nothing < len(failed) else ""
    prompt: Any = problem.prompt
    question = prompt if isinstance(prompt, str) else prompt[-1].text
    return (
        f"the reward {name} {gives}{less} to {len(failed)} of {tried} right answers that the problems have themselves, such as "
        f"{problem.where}: question …{question[-SHOWN:]!r}, answer {forms[0][-SHOWN:]!r}, reward "
        f"{'None' if value is None else f'{value:g}'}."
    )
