"""vLLM's `/inference/v1/generate`: token ids in, token ids and log-probabilities out.

`/v1/completions` can give token ids too, but the server turns every token into text first, which a process of its own has to do
for all answers together; here nothing is detokenised, and no default of the model's takes part in sampling.
"""

from __future__ import annotations

from typing import Any

from preft_cli.errors import UserError
from preft_cli.rl.rollout import Rollout, Sampling
from preft_cli.rl.rollouts.answers import require_whole

GENERATE = "/inference/v1/generate"
"""`preft serve` has it with the option `enable-scale-out`."""

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
    require_whole(found, reasons, n, "the server")
    return found
