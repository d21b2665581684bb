"""Hold every answer against the reference under every adapter: near to its own, and another's would have changed its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine_patch.adapter import Adapter
from engine_patch.rule import is_prefill_only
from tests.reference import MaskedReference
from tests.schedules.check import missing
from tests.schedules.draw import Ask, Schedule
from tests.schedules.drive import Answer
from tests.schedules.models import Material

BOUND = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.15}
"""On every log-probability: what rounding of the served dtype can move it by."""
LOUD = 10
"""Bounds by which some token of a text must fall behind under any wrong adapter."""


@dataclass
class Verdict:
    """What a run has shown."""

    requests: int = 0
    answers: int = 0
    tokens: int = 0
    tokens_by_method: dict[str, int] = field(default_factory=dict)
    aborted: int = 0
    unfinished: int = 0
    """Requests that ended with an error, or short of tokens."""
    wrong_first_tokens: int = 0
    wrong_texts: int = 0
    """Answers with a token that is not the reference's choice, nor as good as it to within two bounds."""
    wrong_answers: int = 0
    """Those, and answers with a log-probability that is off by more than the bound."""
    largest_deviation: float = 0.0
    bound: float = 0.0
    nearest_wrong: float = float("inf")
    """By how much the best of all wrong adapters (or none) misses a text, at its worst token."""
    nearest_wrong_positions: float = float("inf")
    """The same for the right adapter on the wrong positions: on all instead of the prompt's, or the other way round."""
    quiet: int = 0
    """Answers whose text a wrong adapter could have given, to within `LOUD` bounds: they prove nothing."""
    misses: list[str] = field(default_factory=list)


def judge(schedule: Schedule, answers: list[Answer], material: Material, dtype: str) -> Verdict:
    """All checks; the worst answers come first in `misses`."""
    verdict = Verdict(requests=len(schedule.asks), bound=BOUND[dtype])
    answers = sorted((answer for answer in answers if answer.tokens), key=lambda one: len(one.prompt + one.tokens))
    by_ask = {id(answer.ask): answer for answer in answers}
    for index, ask in enumerate(schedule.asks):
        found = by_ask.get(id(ask))
        count_answer(verdict, ask, found, material)
        if lacks := list(missing(ask, [found] if found else [])):
            verdict.unfinished += 1
            verdict.misses.append(f"request {index}, {ask.name or 'base'}: {'; '.join(lacks)}")
    gaps, behind, first, others, positions = compare(answers, material)
    # The choice and what it is preferred to can both be off by a bound. A NaN is wrong.
    wrong_first, wrong_text = (~(one < 2 * verdict.bound) for one in (first, behind))
    wrong = wrong_text | ~(gaps < verdict.bound)
    quiet = ~wrong & (torch.minimum(others, positions) < LOUD * verdict.bound)
    verdict.wrong_first_tokens, verdict.wrong_texts = int(wrong_first.sum()), int(wrong_text.sum())
    verdict.wrong_answers, verdict.quiet = int(wrong.sum()), int(quiet.sum())
    verdict.largest_deviation = float(gaps.max())
    verdict.nearest_wrong, verdict.nearest_wrong_positions = float(others.min()), float(positions.min())
    for row in torch.where(wrong, gaps.nan_to_num(torch.inf), -1).argsort(descending=True)[: verdict.wrong_answers]:
        verdict.misses.append(
            f"{who(answers[row], material)}: off by {gaps[row]:.3g}, another adapter misses its text by {others[row]:.3g}"
        )
    for row in quiet.nonzero()[:, 0]:
        least = min(float(others[row]), float(positions[row]))
        verdict.misses.append(
            f"{who(answers[row], material)}: quiet, another adapter would miss its text by {least:.3g}"
        )
    return verdict


def count_answer(verdict: Verdict, ask: Ask, answer: Answer | None, material: Material) -> None:
    """Add one request's answer to the counts."""
    tokens = len(answer.tokens) if answer else 0
    verdict.answers += bool(answer)
    verdict.tokens += tokens
    verdict.aborted += ask.abort_after is not None and tokens < ask.max_tokens
    if answer:
        method = material.adapters[answer.content].method if answer.content is not None else "base"
        verdict.tokens_by_method[method] = verdict.tokens_by_method.get(method, 0) + tokens


def who(answer: Answer, material: Material) -> str:
    """An answer in words."""
    adapter = material.adapters[answer.content] if answer.content is not None else None
    name = f"{answer.ask.name}, {adapter.method} of rank {adapter.rank}" if adapter else "base"
    return f"{name}, {len(answer.prompt)} + {len(answer.tokens)} tokens, first {answer.tokens[0]}"


class Comparison(NamedTuple):
    """Every answer under every adapter; all are `[num_answers]`."""

    gaps: torch.Tensor
    """Largest distance of a log-probability to the reference's."""
    behind: torch.Tensor
    """By how much its tokens fall behind the reference's choices, at most, in nats: 0 if they are its choices."""
    first: torch.Tensor
    """The same of its first token."""
    others: torch.Tensor
    """As `behind`, under the wrong adapter (or none) that comes nearest."""
    positions: torch.Tensor
    """As `behind`, under its own adapter on the wrong positions; infinite where the text has no more than one token."""


def compare(answers: list[Answer], material: Material) -> Comparison:
    """All answers, sorted by length, under all adapters: no pair is left out."""
    own = torch.tensor([-1 if answer.content is None else answer.content for answer in answers])
    several = torch.tensor([len(answer.tokens) > 1 for answer in answers])
    result = Comparison(*torch.full((5, len(answers)), torch.inf).unbind())
    for index, adapter in ((-1, None), *enumerate(material.adapters)):
        placed = on_device(adapter, material.reference) if adapter else None
        prefill_only = adapter is not None and is_prefill_only(adapter.method)
        for rows in batches(answers, range(len(answers))):
            right = own[rows] == index
            gaps, behind, first = scores([answers[row] for row in rows], placed, prefill_only, material.reference)
            for kept, found in zip(result[:4], (gaps, behind, first, behind), strict=True):
                replace = ~right & ~(found > kept[rows]) if kept is result.others else right
                kept[rows] = torch.where(replace, found, kept[rows])
        if placed:
            for rows in batches(answers, torch.where((own == index) & several)[0].tolist()):
                wrong = scores([answers[row] for row in rows], placed, not prefill_only, material.reference)
                result.positions[rows] = wrong[1]
    return result


def batches(answers: list[Answer], rows: Iterable[int]) -> Iterator[list[int]]:
    """Rows of answers that are judged together, which are sorted by length: so many that their tokens fit."""
    most = 1 << 16 if torch.cuda.is_available() else 1 << 13
    batch: list[int] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(answers[row].prompt + answers[row].tokens) > most:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def on_device(adapter: Adapter, reference: MaskedReference) -> Adapter:
    """The adapter's weights in float32, where the reference computes."""
    pairs = {name: pair.map(lambda t: t.float().to(reference.model.device)) for name, pair in adapter.pairs.items()}
    return Adapter(adapter.method, adapter.base, pairs)


def scores(
    answers: list[Answer], adapter: Adapter | None, prefill_only: bool, reference: MaskedReference
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Under one adapter: `gaps`, `behind` and `first` of the answers, see `Comparison`."""
    logprobs = reference.batch_logprobs([(answer.prompt, answer.tokens) for answer in answers], adapter, prefill_only)
    tokens = torch.tensor([token for answer in answers for token in answer.tokens], device=logprobs.device)
    served = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    sizes = torch.tensor([len(answer.tokens) for answer in answers])
    chosen, best = logprobs.gather(1, tokens[:, None])[:, 0].cpu(), logprobs.max(1).values.cpu()
    behind = best - chosen

    def most(values: torch.Tensor) -> torch.Tensor:
        return torch.segment_reduce(values, "max", lengths=sizes)

    return most((served - chosen).abs()), most(behind), behind[sizes.cumsum(0) - sizes]
