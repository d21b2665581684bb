"""Hold answers against the reference, token by token."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tests.schedules.draw import Ask, Schedule
from tests.schedules.drive import Answer
from tests.schedules.models import Material

TOLERANCE = 1e-3
"""On every log-probability where the engine computes in float32, as the reference does; planted faults differ by far more."""
HALF = {"bfloat16": (0.1, 0.4, 0.6), "float16": (0.0125, 0.06, 0.1)}
"""The same in 8 and 11 bits, where rounding alone can move one by a unit: on the mean, on 99% of them, and on every answer's
root mean square."""

LONG = 8
"""Tokens of an answer that is judged alone: in fewer, rounding can point where a fault does by chance."""

LEANING = 0.1
"""Bound on how far half precision may lean from the right mask (0) to a wrong one (1)."""


@dataclass
class Tally:
    """What a run has seen, and how far the engine was from the reference."""

    schedules: int = 0
    requests: int = 0
    reloads_midway: int = 0
    samples: int = 0
    tokens: int = 0
    tokens_by_method: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: int = 0
    aborted: int = 0
    second_turns: int = 0
    gaps: list[float] = field(default_factory=list)
    """Of every log-probability, absolute."""
    answer_rms: list[float] = field(default_factory=list)
    """Root mean square of the gaps of every answer."""
    leanings: list[Leaning] = field(default_factory=list)
    """Of every answer with a prefill-only adapter, in half precision."""
    judged_alone: int = 0
    """Answers that a fault would move far more than rounding does."""
    misses: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Counts, and the spread of the gaps."""
        spread = {
            "worst": max(self.gaps, default=0.0),
            "mean": statistics.fmean(self.gaps or [0.0]),
            "p99": p99(self.gaps),
        }
        if self.leanings:
            spread["leaning_to_a_mask_off_by_one"] = leaning(self.leanings)
            spread["worst_answer"] = max(self.answer_rms)
        counts = {name: len(value) if isinstance(value, list) else value for name, value in vars(self).items()}
        return {"logprobs": counts.pop("gaps"), **counts, **spread}


def missing(ask: Ask, answers: list[Answer]) -> Iterator[str]:
    """What a request that was not aborted should have been answered, and was not."""
    if ask.abort_after is not None:
        return
    samples = [answer for answer in answers if answer.ask is ask]
    if len(samples) != ask.n:
        yield f"{len(samples)} of {ask.n} samples"
    for sample in samples:
        if len(sample.tokens) != ask.max_tokens:
            yield f"{len(sample.tokens)} of {ask.max_tokens} tokens"
        if ask.prompt_logprobs and len(sample.prompt_logprobs or ()) != len(sample.prompt) - 1:
            yield f"{len(sample.prompt_logprobs or ())} log-probabilities of a prompt of {len(sample.prompt)} tokens"


def rms(values: list[float]) -> float:
    """Root mean square."""
    return statistics.fmean(value * value for value in values or [0.0]) ** 0.5


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return sorted(values)[int(0.99 * len(values))] if values else 0.0


def check(schedule: Schedule, answers: list[Answer], material: Material, tally: Tally, where: str, exact: bool) -> None:
    """Add the answers of a schedule to `tally`, with a miss for what is not there, and for what differs from the reference.

    Where not `exact`, that is in half precision, `check_spread` says at the end whether they differ by more than rounding.
    """
    tally.schedules += 1
    tally.requests += len(schedule.asks)
    tally.misses += [f"{where}: {what}" for ask in schedule.asks for what in missing(ask, answers)]
    for answer in answers:
        tally.samples += 1
        tally.tokens += len(answer.tokens)
        method = material.adapters[answer.content].method if answer.content is not None else "base"
        tally.tokens_by_method[method] = tally.tokens_by_method.get(method, 0) + len(answer.tokens)
        tally.prompt_logprobs += len(answer.prompt_logprobs or ())
        tally.aborted += answer.ask.abort_after is not None and len(answer.tokens) < answer.ask.max_tokens
        tally.second_turns += answer.ask.second_turn_of is not None
        gaps = differences(answer, material)
        tally.gaps += gaps
        tally.answer_rms.append(rms(gaps))
        if not exact and acts_on_prompt_only(answer, material) and answer.tokens:
            tally.leanings.append(lean(answer, material))
        if exact and not all(gap < TOLERANCE for gap in gaps):  # a NaN is a miss
            who = f"content {answer.content} as {answer.ask.name}" if answer.ask.name else "base"
            tally.misses.append(f"{where}: {who}, {len(answer.prompt)} prompt tokens: off by {max(gaps):.3g}")


def check_spread(tally: Tally, dtype: str) -> None:
    """For an engine in half precision: a miss if the gaps are more than rounding, or lean to those that a fault would make."""
    mean, (most, most_p99, most_rms) = statistics.fmean(tally.gaps), HALF[dtype]
    if not (mean < most and p99(tally.gaps) < most_p99):
        tally.misses.append(f"mean {mean:.3g}, p99 {p99(tally.gaps):.3g}: more than rounding")
    tally.misses += [
        f"an answer is off by {one:.3g}: more than rounding" for one in tally.answer_rms if not one < most_rms
    ]
    if not abs(leaning(tally.leanings)) < LEANING:
        tally.misses.append(f"leans by {leaning(tally.leanings):.3g} to a mask that is off by one")
    usual = statistics.median(one.rms for one in tally.leanings)
    alone = [one for one in tally.leanings if one.tokens >= LONG and one.fault_rms > 4 * usual]
    tally.misses += [
        f"an answer leans by {one.to_fault:.3g} to a mask that is off by one" for one in alone if one.is_faulty
    ]
    tally.judged_alone = len(alone)


class Leaning(NamedTuple):
    """One answer's log-probabilities seen as `right + to_fault * (faulty - right) + rounding`."""

    to_fault: float
    """0: as the reference; 1: as a reference whose mask ends one token too early."""
    fault_rms: float
    """How much that fault would move them."""
    rms: float
    """How much they differ from the reference."""
    rest_rms: float
    """How much of that is not along the fault."""
    tokens: int

    @property
    def is_faulty(self) -> bool:
        """Nearer to the faulty reference, and by what the fault explains: rounding has no such direction in many tokens."""
        return self.to_fault > 0.5 and self.rest_rms < 0.5 * self.to_fault * self.fault_rms


def lean(answer: Answer, material: Material) -> Leaning:
    """By least squares over the sampled tokens."""
    served = torch.tensor(answer.logprobs)
    right, faulty = (expected(answer, material, len(served), shift) for shift in (0, -1))
    gap, fault = served - right, faulty - right
    to_fault = float(gap @ fault / (fault @ fault))

    def size(values: torch.Tensor) -> float:
        return float(values.square().mean().sqrt())

    return Leaning(to_fault, size(fault), size(gap), size(gap - to_fault * fault), len(served))


def leaning(leanings: list[Leaning]) -> float:
    """Of all answers together: each counts by how much the fault would move it."""
    weights = [one.fault_rms**2 for one in leanings]
    return sum(one.to_fault * weight for one, weight in zip(leanings, weights, strict=True)) / sum(weights)


def differences(answer: Answer, material: Material) -> list[float]:
    """Of every log-probability that the engine gave, of sampled tokens and, if asked for, before them of the prompt's."""
    served = torch.tensor([*(answer.prompt_logprobs or ()), *answer.logprobs])
    return (served - expected(answer, material, len(served))).abs().tolist() if len(served) else []


def acts_on_prompt_only(answer: Answer, material: Material) -> bool:
    """Whether the request's adapter is prefill-only."""
    return answer.content is not None and material.adapters[answer.content].method.endswith("p")


def expected(answer: Answer, material: Material, last: int, shift: int = 0) -> torch.Tensor:
    """The reference's log-probabilities of the `last` tokens; `shift` moves the end of its mask, as a fault would."""
    ids = answer.prompt + answer.tokens
    adapter = material.adapters[answer.content] if answer.content is not None else None
    adapted = len(answer.prompt) if acts_on_prompt_only(answer, material) else len(ids)
    return material.reference.sequence_logprobs(ids, adapter, adapted + shift, last)
