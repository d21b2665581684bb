"""The requests that every arm answers: same ids, order, prompts, lengths and adapters."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from preft_cli.bench.plan import BenchPlan, Range
from preft_cli.errors import UserError


class Request(BaseModel):
    """One request; `adapter` is a number that arms without adapters pass over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    prompt_token_ids: list[int]
    output_len: int
    adapter: int


class Workload(BaseModel):
    """Requests of the warm-up and of each timed repetition."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int
    warmup: list[Request]
    repetitions: list[list[Request]]

    def digest(self) -> str:
        """SHA-256 over everything that an arm is asked to do."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest prompt, and of the longest answer."""
        everything = [request for requests in (self.warmup, *self.repetitions) for request in requests]
        return max(len(one.prompt_token_ids) for one in everything), max(one.output_len for one in everything)


class Work(NamedTuple):
    """What a request asks for, beside its prompt."""

    prompt_len: int
    output_len: int
    adapter: int


def make_workload(plan: BenchPlan, vocab_size: int, prompts: Sequence[list[int]] | None = None) -> Workload:
    """Draw the requests from the plan's seed.

    All repetitions ask for the same work (lengths, adapters, order) with other prompts. Random prompts never occur twice.

    Args:
        plan: lengths and adapters.
        vocab_size: random prompts are made of ids below it.
        prompts: token ids of given prompts, used in turn in place of random ones of `plan.prompt_len`.

    Raises:
        UserError: if the vocabulary is too small for that many different prompts of that length.
    """
    draw = random.Random(plan.seed)
    work = draw_work(plan, draw)
    warmup = [
        Work(work[i % len(work)].prompt_len, plan.warmup_output_len, i % plan.num_adapters)
        for i in range(plan.warmup_requests)
    ]
    sets = [("warmup", warmup), *((f"rep{number}", work) for number in range(plan.repeats))]
    lengths = [one.prompt_len for _, items in sets for one in items]
    if prompts is None:
        supply = iter(distinct_prompts(draw, lengths, vocab_size))
    else:
        supply = (prompts[i % len(prompts)] for i in range(len(lengths)))
    made = [
        [
            Request(id=f"{label}-{i}", prompt_token_ids=next(supply), output_len=one.output_len, adapter=one.adapter)
            for i, one in enumerate(items)
        ]
        for label, items in sets
    ]
    return Workload(seed=plan.seed, warmup=made[0], repetitions=made[1:])


def draw_work(plan: BenchPlan, draw: random.Random) -> list[Work]:
    """Lengths and adapter of each request of a repetition."""
    adapters = choose_adapters(plan, draw)
    return [Work(between(plan.prompt_len, draw), between(plan.output_len, draw), adapter) for adapter in adapters]


def between(bounds: Range, draw: random.Random) -> int:
    """A length, all from low to high being as likely; nothing is drawn where they are equal."""
    return bounds[0] if bounds[0] == bounds[1] else draw.randint(*bounds)


def choose_adapters(plan: BenchPlan, draw: random.Random) -> list[int]:
    """The adapter of each request: in turn, uniformly, or by Zipf's law (the first is asked for most)."""
    if plan.adapter_choice == "round-robin":
        return [i % plan.num_adapters for i in range(plan.num_requests)]
    exponent = plan.zipf_exponent if plan.adapter_choice == "zipf" else 0.0
    weights = [(k + 1) ** -exponent for k in range(plan.num_adapters)]
    return draw.choices(range(plan.num_adapters), weights, k=plan.num_requests)


def distinct_prompts(draw: random.Random, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Different prompts of these lengths, of token ids below `vocab_size`.

    They differ in the first token where the vocabulary allows: then not even a beginning is shared.
    """
    if len(lengths) > vocab_size ** min(lengths):
        raise UserError(
            f"bench.prompt_len: {min(lengths)} tokens are too few for {len(lengths)} different prompts", exit_code=2
        )
    if len(lengths) <= vocab_size:
        firsts = draw.sample(range(vocab_size), len(lengths))
        return [
            [first, *draw.choices(range(vocab_size), k=length - 1)]
            for first, length in zip(firsts, lengths, strict=True)
        ]
    found: dict[tuple[int, ...], None] = {}
    for length in lengths:
        prompt = tuple(draw.choices(range(vocab_size), k=length))
        while prompt in found:
            prompt = tuple(draw.choices(range(vocab_size), k=length))
        found[prompt] = None
    return [list(prompt) for prompt in found]


def failure(request: Request, num_tokens: int, finish_reason: str | None) -> str | None:
    """Why an answer does not count, or None: it must have exactly the tokens that were asked for."""
    if num_tokens == request.output_len and finish_reason == "length":
        return None
    return f"{request.id}: {num_tokens} of {request.output_len} tokens, finish reason {finish_reason}"
