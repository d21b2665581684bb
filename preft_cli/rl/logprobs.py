"""Log-probabilities of sampled answers as the trainer computes them, with the prompt of a group computed once.

The distribution is the one that the engine draws from: after temperature, top-k, top-p and min-p, in vLLM's order.

Shapes: B answers, C columns of the longest one, N tokens of all of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from preft_cli.data.turn import Row
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.rl.rollout import Sampling
from preft_cli.training.arrange import arrange
from preft_cli.training.collate import Collator
from preft_cli.training.objective import LabelLogits
from preft_cli.training.packed import ordered


class Scored(NamedTuple):
    """Of each token of each answer; 0 behind its end."""

    logprobs: Tensor
    """[B, C], float32"""
    entropies: Tensor | None
    """[B, C], nats; of the distribution that tokens are drawn from."""


class Scorer:
    """Computes them for one adapted model."""

    def __init__(self, adapted: AdaptedModel, collate: Collator, sampling: Sampling) -> None:
        self._adapted = adapted
        self._collate = collate
        self._sampling = sampling
        self._label_logits = LabelLogits(adapted)

    def __call__(self, rows: Sequence[Row], model: Any = None, *, entropy: bool = False) -> Scored:
        """Of the completions of `rows`; `model` is the model as the trainer wraps it, if it does."""
        rows = [Row(row.prompt_ids, row.completion_ids, str(number)) for number, row in enumerate(rows)]
        sequences = self._sequences(rows)
        device = self._adapted.model.device
        batch = {name: tensor.to(device) for name, tensor in self._collate(sequences).items()}
        logits_NV, tokens_N = self._label_logits(batch, model)
        return self._spread(rows, sequences, *score(logits_NV, tokens_N, self._sampling, entropy=entropy))

    def _sequences(self, rows: list[Row]) -> list[list[Row]]:
        """Which rows lie in one sequence, in the order in which `pack` lays them down."""
        if not self._collate.share_prompts:
            return [[row] for row in rows]
        return [ordered(sequence)[0] for sequence in arrange(rows, self._collate.pair_cost)]

    @staticmethod
    def _spread(rows: list[Row], sequences: list[list[Row]], logprobs_N: Tensor, entropies_N: Tensor | None) -> Scored:
        """From the order of the sequences to `[B, C]`."""
        longest = max(len(row.completion_ids) for row in rows)
        laid = [row for sequence in sequences for row in sequence]
        place_N = torch.cat([int(row.where) * longest + torch.arange(len(row.completion_ids)) for row in laid])

        def spread(values_N: Tensor) -> Tensor:
            empty = values_N.new_zeros(len(rows) * longest)
            return empty.scatter(0, place_N.to(values_N.device), values_N).view(len(rows), longest)

        return Scored(spread(logprobs_N), None if entropies_N is None else spread(entropies_N))


CHUNK = 256
"""Tokens whose logits are float32 at once; backward computes them again instead of keeping them."""


def score(logits_NV: Tensor, tokens_N: Tensor, sampling: Sampling, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities `[N]` of `tokens_N`, and with `entropy` the entropies `[N]` (nats, without gradient)."""
    parts = [
        checkpoint(_score, logits, tokens, sampling, entropy, use_reentrant=False)
        for logits, tokens in zip(torch.split(logits_NV, CHUNK), torch.split(tokens_N, CHUNK), strict=True)
    ]
    logprobs = torch.cat([logprobs for logprobs, _ in parts])
    return logprobs, torch.cat([entropies for _, entropies in parts]) if entropy else None


def _score(logits_NV: Tensor, tokens_N: Tensor, sampling: Sampling, entropy: bool) -> tuple[Tensor, Tensor | None]:
    logits_NV = logits_NV.float() / sampling.temperature
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        logits_NV = logits_NV.masked_fill(~kept(logits_NV.detach(), tokens_N, sampling), -torch.inf)
    everything_N = logits_NV.logsumexp(-1)
    logprobs_N = logits_NV.gather(-1, tokens_N[:, None])[:, 0] - everything_N
    if not entropy:
        return logprobs_N, None
    with torch.no_grad():
        mean_N = (logits_NV.softmax(-1) * logits_NV.masked_fill(logits_NV == -torch.inf, 0)).sum(-1)
        return logprobs_N, everything_N.detach() - mean_N


def kept(logits_NV: Tensor, tokens_N: Tensor, sampling: Sampling) -> Tensor:
    """Which tokens could have been drawn, `[N, V]`: min-p first, then top-k, then top-p, as vLLM does.

    Tokens that tie with the last one that is kept are kept too; vLLM's kernel on GPUs drops some of them.
    The token that was drawn is one of them in every case: the trainer's logits differ from the engine's in the last bits, and
    a token at the edge must not become impossible by that.
    """
    logits_NV = logits_NV.clone()
    if sampling.min_p:
        probabilities_NV = logits_NV.softmax(-1)
        logits_NV[probabilities_NV < sampling.min_p * probabilities_NV.amax(-1, keepdim=True)] = -torch.inf
    if sampling.top_k:
        smallest_N1 = logits_NV.topk(min(sampling.top_k, logits_NV.shape[-1])).values[:, -1:]
        logits_NV[logits_NV < smallest_N1] = -torch.inf
    if sampling.top_p < 1:
        rising_NV, order_NV = logits_NV.sort(-1)
        # From the least likely on: what lies wholly below 1 - top_p goes; the most likely one stays.
        out_NV = rising_NV.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        out_NV[:, -1] = False
        logits_NV[out_NV.scatter(-1, order_NV, out_NV)] = -torch.inf
    found_NV = logits_NV != -torch.inf
    return found_NV.scatter(-1, tokens_N[:, None], True)
