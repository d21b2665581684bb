"""Hold answers against the reference, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tests.schedules.drive import Answer
from tests.schedules.models import Material

TOLERANCE = 1e-3
"""On every log-probability, float32 on both sides; planted faults differ by far more."""


@dataclass
class Tally:
    """What a run has seen."""

    schedules: int = 0
    requests: int = 0
    samples: int = 0
    tokens: int = 0
    prompt_logprobs: int = 0
    aborted: int = 0
    second_turns: int = 0
    worst: float = 0.0
    misses: list[str] = field(default_factory=list)


def check(answers: list[Answer], material: Material, tally: Tally, where: str) -> None:
    """Add the answers of one schedule to `tally`, with a miss for each that differs from the reference."""
    tally.schedules += 1
    tally.requests += len({id(answer.ask) for answer in answers})
    for answer in answers:
        gap = difference(answer, material)
        tally.samples += 1
        tally.tokens += len(answer.tokens)
        tally.prompt_logprobs += len(answer.prompt_logprobs or ())
        tally.aborted += answer.ask.abort_after is not None and len(answer.tokens) < answer.ask.max_tokens
        tally.second_turns += answer.ask.second_turn_of is not None
        tally.worst = max(tally.worst, gap)
        if not gap < TOLERANCE:  # a NaN is a miss
            who = f"content {answer.content} as {answer.ask.name}" if answer.ask.name else "base"
            tally.misses.append(f"{where}: {who}, {len(answer.prompt)} prompt tokens: off by {gap:.3g}")


def difference(answer: Answer, material: Material) -> float:
    """The largest difference of any log-probability that the engine gave, of sampled tokens and, if asked for, of the prompt's."""
    served = torch.tensor([*(answer.prompt_logprobs or ()), *answer.logprobs])
    if not len(served):
        return 0.0
    ids = answer.prompt + answer.tokens
    adapter = material.adapters[answer.content] if answer.content is not None else None
    adapted = len(ids) if adapter and adapter.method == "lora" else len(answer.prompt)
    expected = material.reference.sequence_logprobs(ids, adapter, adapted, last=len(served))
    return float((served - expected).abs().max())
