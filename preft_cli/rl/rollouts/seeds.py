"""Seeds of the prompts of one call."""

from __future__ import annotations

import hashlib


def prompt_seed(seed: int, index: int) -> int:
    """The seed of prompt number `index` in a call with `seed`: equal prompts of one call get different answers.

    The engine adds the number of the answer to it, so seeds of neighbours must not be neighbours.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "big") >> 2
