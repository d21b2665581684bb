"""The requests: more than the engine computes at once, over all adapters, some of them asked for far more often."""

from __future__ import annotations

import random

from tests.schedules.draw import BLOCK, Ask, EngineSetting, Schedule

LONGEST = 200
ARRIVALS = 4
"""Requests a step."""
FAVOURITES = 16
"""Adapters of half of the requests: their blocks are found in the prefix cache, the others' adapters come and go."""
SETTING = EngineSetting(
    budget=512, blocks=128, prefix_caching=True, slots=16, pool=2.5, host=5, max_num_seqs=128, max_rank=64
)
"""The pools hold a few of the largest adapters, and of all together less than a tenth."""


def draw(seed: int, requests: int, adapters: int, vocab: int) -> Schedule:
    """The same for the same arguments. Prompts begin as one of three documents does."""
    rng = random.Random(seed)
    documents = [[rng.randrange(vocab) for _ in range(LONGEST)] for _ in range(3)]
    schedule = Schedule()
    for index in range(requests):
        prompt = rng.choice(documents)[: _length(rng)]
        if rng.random() < 0.2:  # another ending
            prompt = [*prompt[:-1], rng.randrange(vocab)]
        adapter = rng.choice((rng.randrange(adapters), rng.randrange(min(adapters, FAVOURITES))))
        ask = Ask(
            arrival=index // ARRIVALS,
            prompt=prompt,
            name=f"adapter {adapter}" if rng.random() < 0.9 else None,
            max_tokens=rng.randint(1, 40),
            abort_after=rng.randrange(1, 60) if rng.random() < 0.05 else None,
        )
        schedule.asks.append(ask)
    return schedule


def _length(rng: random.Random) -> int:
    """1 to 200 tokens, at times a block boundary or one beside it."""
    edge = rng.randint(1, LONGEST // BLOCK) * BLOCK + rng.choice((-1, 0, 1))
    return rng.choice((edge, rng.randint(1, 40), rng.randint(1, LONGEST)))
