"""What a random schedule is: requests with their arrivals, and what happens to them on the way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

BLOCK = 32
MAX_MODEL_LEN = 512
NAMES = ("ada", "bob", "cy", "dee")


@dataclass(frozen=True)
class EngineSetting:
    """What the schedules of one engine share. A pool of 18 blocks holds 544 tokens: requests are preempted."""

    budget: int
    """max_num_batched_tokens"""
    blocks: int
    prefix_caching: bool
    slots: int
    pool: float
    """size of the device pool, in adapters of the largest rank"""
    host: float
    """size of the host pool"""
    max_num_seqs: int = 16
    max_rank: int = 16
    policy: str = "fcfs"
    dtype: str = "float32"
    tensor_parallel: int = 1
    eager: bool = False
    """without CUDA graphs, and without compiling; on a CPU always"""


# Pools so small that adapters come and go in every step, and that two of a large and a small one cannot be there at once.
SETTINGS = (
    EngineSetting(budget=32, blocks=20, prefix_caching=True, slots=1, pool=1, host=1),
    EngineSetting(budget=64, blocks=18, prefix_caching=False, slots=2, pool=1, host=1),
    EngineSetting(budget=48, blocks=18, prefix_caching=True, slots=2, pool=1.6, host=2),
    EngineSetting(budget=512, blocks=64, prefix_caching=True, slots=4, pool=3, host=4),
    EngineSetting(budget=33, blocks=20, prefix_caching=True, slots=3, pool=1.5, host=1.5, policy="priority"),
    EngineSetting(budget=200, blocks=18, prefix_caching=False, slots=1, pool=3, host=1),
)


@dataclass
class Ask:
    """One request. `name` None is the base model. A second turn's prompt starts with another request's prompt and answer."""

    arrival: int
    """Engine steps after the schedule's start; a second turn arrives when the first has ended."""
    prompt: list[int]
    name: str | None
    max_tokens: int
    n: int = 1
    prompt_logprobs: bool = False
    abort_after: int | None = None
    """Steps after its arrival."""
    second_turn_of: int | None = None
    priority: int = 0


@dataclass
class Schedule:
    asks: list[Ask] = field(default_factory=list)
    reloads: list[tuple[int, str, int]] = field(default_factory=list)
    """(step, name, index of the content that the name stands for from then on)"""


def draw(seed: int, vocab: int, num_contents: int, max_asks: int) -> Schedule:
    """A schedule, the same for the same arguments.

    Prompts of one schedule are cut from two documents, so that requests of different adapters share beginnings; the documents
    are among four of all schedules, so that they also meet blocks of earlier schedules.
    """
    rng = random.Random(seed)
    documents = [_document(rng.randrange(4), vocab) for _ in range(2)]
    names = rng.sample(NAMES, rng.randint(1, len(NAMES)))
    schedule = Schedule()
    for _ in range(rng.randint(2, max_asks)):
        prompt = rng.choice(documents)[: _length(rng)]
        if rng.random() < 0.2:  # another ending
            prompt = [*prompt[:-1], rng.randrange(vocab)]
        ask = Ask(
            arrival=rng.choice((0, 0, 0, rng.randrange(30))),
            prompt=prompt,
            name=rng.choice([*names, *names, None]),
            max_tokens=rng.choice((1, 2, rng.randint(3, 20), rng.randint(33, 70), rng.randint(33, 70))),
            n=rng.choice((1, 1, 1, 1, rng.randint(2, 4))),
            prompt_logprobs=rng.random() < 0.15,
            abort_after=rng.randrange(1, 40) if rng.random() < 0.12 else None,
            priority=rng.randrange(3),
        )
        earlier = [i for i, other in enumerate(schedule.asks) if other.abort_after is None and other.n == 1]
        if earlier and rng.random() < 0.35:
            ask.second_turn_of = rng.choice(earlier)
            first = schedule.asks[ask.second_turn_of]
            ask.name = rng.choice((first.name, first.name, first.name, ask.name))
            ask.prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 40))]
        schedule.asks.append(ask)
    for _ in range(rng.choice((0, 0, 1, 2))):
        schedule.reloads.append((rng.randrange(60), rng.choice(NAMES), rng.randrange(num_contents)))
    return schedule


def _document(number: int, vocab: int) -> list[int]:
    rng = random.Random(f"document {number}")
    return [rng.randrange(vocab) for _ in range(400)]


def _length(rng: random.Random) -> int:
    """1 to 400 tokens, often a block boundary or one beside it."""
    edge = rng.randint(1, 8) * BLOCK + rng.choice((-1, 0, 1))
    return rng.choice((edge, edge, rng.randint(1, 40), rng.randint(1, 400)))
