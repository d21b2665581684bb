"""The requests that every arm answers: same ids, order, prompts, lengths and adapters."""

from __future__ import annotations

import hashlib
import random

from pydantic import BaseModel, ConfigDict

from preft_cli.bench.plan import BenchPlan
from preft_cli.errors import UserError


class Request(BaseModel):
    """One request; `adapter` is a number that arms without adapters pass over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    prompt_token_ids: list[int]
    output_len: int
    adapter: int


class Workload(BaseModel):
    """Requests of the warm-up and of each timed repetition; no prompt occurs twice, so that no cache can help."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int
    warmup: list[Request]
    repetitions: list[list[Request]]

    def digest(self) -> str:
        """SHA-256 over everything that an arm is asked to do."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def make_workload(plan: BenchPlan, vocab_size: int) -> Workload:
    """Draw the requests from the plan's seed.

    Adapters take turns, from the first one in each repetition, so that repetitions ask for the same work.

    Raises:
        UserError: if the vocabulary is too small for that many different prompts of that length.
    """
    prompts = distinct_prompts(
        random.Random(plan.seed),
        count=plan.warmup_requests + plan.repeats * plan.num_requests,
        length=plan.prompt_len,
        vocab_size=vocab_size,
    )

    def requests(label: str, count: int, output_len: int) -> list[Request]:
        return [
            Request(
                id=f"{label}-{i}",
                prompt_token_ids=prompts.pop(),
                output_len=output_len,
                adapter=i % plan.num_adapters,
            )
            for i in range(count)
        ]

    return Workload(
        seed=plan.seed,
        warmup=requests("warmup", plan.warmup_requests, plan.warmup_output_len),
        repetitions=[requests(f"rep{r}", plan.num_requests, plan.output_len) for r in range(plan.repeats)],
    )


def distinct_prompts(draw: random.Random, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """`count` different prompts of `length` token ids below `vocab_size`.

    They differ in the first token where the vocabulary allows: then not even a beginning is shared.
    """
    if count > vocab_size**length:
        raise UserError(f"bench.prompt_len: {length} tokens are too few for {count} different prompts", exit_code=2)
    if count <= vocab_size:
        firsts = draw.sample(range(vocab_size), count)
        return [[first, *draw.choices(range(vocab_size), k=length - 1)] for first in firsts]
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple(draw.choices(range(vocab_size), k=length))] = None
    return [list(prompt) for prompt in found]


def failure(request: Request, num_tokens: int, finish_reason: str | None) -> str | None:
    """Why an answer does not count, or None: it must have exactly the tokens that were asked for."""
    if num_tokens == request.output_len and finish_reason == "length":
        return None
    return f"{request.id}: {num_tokens} of {request.output_len} tokens, finish reason {finish_reason}"
