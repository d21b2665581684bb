"""What every answer must be before anything is learnt from it, whoever sampled it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from preft_cli.errors import UserError
from preft_cli.rl.rollout import Rollout, Sampling

CLAMPED = -9999.0
"""What vLLM's routes write where there is no log-probability."""


def require_whole(found: Sequence[Rollout], reasons: Sequence[str | None], n: int, who: str) -> None:
    """Refuse the answers to one prompt if a trainer could not learn from them.

    Args:
        found: the answers.
        reasons: why each ended, in vLLM's words.
        n: how many were asked for.
        who: what sampled them, for people.

    Raises:
        UserError: an answer was ended from outside, is missing or empty, or has a token without a finite log-probability.
    """
    if unknown := set(reasons) - {"stop", "length"}:
        raise UserError(
            f"{who} ended an answer before it was whole ({', '.join(sorted(map(str, unknown)))}): does somebody else replace "
            "its adapter, or stop it?"
        )
    if len(found) != n or any(not one.token_ids or len(one.token_ids) != len(one.logprobs) for one in found):
        raise UserError(f"{who} gave {len(found)} answers for {n}, or not a log-probability for each token")
    if any(not math.isfinite(logprob) or logprob <= CLAMPED for one in found for logprob in one.logprobs):
        raise UserError(
            f"{who} drew a token that has no probability: its numbers overflow; try serve.dtype=float32, and a lower "
            "train.learning_rate if it answered before"
        )


def require_room(prompts: Sequence[Sequence[int]], sampling: Sampling, limit: int, who: str) -> None:
    """Refuse prompts whose answers the engine would cut without a word.

    Args:
        prompts: token ids.
        sampling: says how long an answer may be.
        limit: of the engine, for prompt and answer.
        who: whose limit it is, for people.

    Raises:
        UserError: prompt and answer together are longer.
    """
    longest = max(map(len, prompts), default=0)
    if longest + sampling.max_tokens > limit:
        raise UserError(
            f"a prompt of {longest} tokens and an answer of {sampling.max_tokens} (train.grpo.max_completion_length) are more"
            f" than the {limit} tokens of {who} (serve.max_model_len)"
        )
