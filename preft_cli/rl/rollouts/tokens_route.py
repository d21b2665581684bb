"""vLLM's `/inference/v1/generate`: token ids in, token ids and log-probabilities out.

`/v1/completions` can give token ids too, but the server turns every token into text first, which a process of its own has to do
for all answers together; here nothing is detokenised, and no default of the model's takes part in sampling.
"""

from __future__ import annotations

from typing import Any

from preft_cli.errors import UserError
from preft_cli.rl.rollout import Rollout, Sampling

GENERATE = "/inference/v1/generate"
"""`preft serve` has it with the option `enable-scale-out`."""

CLAMPED = -9999.0
"""What vLLM's routes write where there is no log-probability."""

GREEDY_BELOW = 1e-5
"""vLLM takes lower temperatures for zero, and then gives one answer alone: all would be the same."""


def parameters(n: int, sampling: Sampling, seed: int) -> dict[str, Any]:
    """Sampling parameters of vLLM, with all that decides what is drawn: a default of the model's must not slip in."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "n": n,
        "seed": seed,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),  # beside the model's own, which the engine adds in either case
        "logprobs": 0,  # of the drawn token alone
        "detokenize": False,
    }


def read_answers(document: Any, n: int) -> list[Rollout]:
    """The answers to one prompt.

    Raises:
        UserError: they are not whole.
    """
    try:
        choices = sorted(document["choices"], key=lambda choice: choice["index"])
        reasons = [choice["finish_reason"] for choice in choices]
        found = [Rollout(c["token_ids"], [one["logprob"] for one in c["logprobs"]["content"]]) for c in choices]
    except (KeyError, TypeError) as error:
        raise UserError(f"{GENERATE} does not answer as vLLM does ({error!r}): {str(document)[:200]}") from error
    if unknown := set(reasons) - {"stop", "length"}:
        raise UserError(
            f"the server ended an answer before it was whole ({', '.join(map(str, unknown))}): does somebody else replace its"
            " adapter, or stop it?"
        )
    if len(found) != n or any(not one.token_ids or len(one.token_ids) != len(one.logprobs) for one in found):
        raise UserError(f"{GENERATE} gave {len(found)} answers for {n}, or not a log-probability for each token")
    if any(logprob <= CLAMPED for one in found for logprob in one.logprobs):
        raise UserError(
            "the engine drew a token that has no probability: its numbers overflow; try serve.dtype=float32"
        )
    return found
