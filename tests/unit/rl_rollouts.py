"""Rollouts without an engine: the masked reference draws tokens, slowly and by definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from preft_cli.rl.logprobs import kept
from preft_cli.rl.rollout import Rollout, Sampling, Synced
from tests.reference import MaskedReference


class ReferenceRollouts:
    """See `preft_cli.rl.rollout.Rollouts`."""

    def __init__(self, folder: Path, method: str, base: BaseFingerprint) -> None:
        self.reference = MaskedReference(folder)
        self.method, self.base = method, base
        self.adapter: Adapter | None = None
        self.syncs = 0
        self.seeds: list[int] = []

    def sync(self, pairs: Mapping[str, LowRankPair]) -> Synced:
        self.syncs += 1
        copies = {name: pair.map(lambda tensor: tensor.clone()) for name, pair in pairs.items()}
        self.adapter = Adapter(self.method, self.base, copies)
        return Synced(str(self.syncs), 0.001, 4)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seed: int, *, adapted: bool = True
    ) -> list[list[Rollout]]:
        self.seeds.append(seed)
        draw = torch.Generator().manual_seed(seed)
        adapter = self.adapter if adapted else None
        return [[self._answer(list(prompt), sampling, adapter, draw) for _ in range(n)] for prompt in prompts]

    def stop(self) -> None:
        pass

    def _answer(self, prompt: list[int], sampling: Sampling, adapter: Adapter | None, draw: Any) -> Rollout:
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < sampling.max_tokens and not (ids and ids[-1] in sampling.stop_ids):
            everywhere = adapter is not None and not self.method.endswith("p")
            adapted = len(prompt) + len(ids) if everywhere else len(prompt)
            logits = self.reference.next_logits(prompt + ids, adapter, adapted)[None]
            if sampling.temperature == 0:
                token = int(logits.argmax())
            else:
                logits = logits / sampling.temperature
                best = logits.argmax(-1)
                logits = logits.masked_fill(~kept(logits, best, sampling), -torch.inf)
                token = int(torch.multinomial(logits.softmax(-1)[0], 1, generator=draw))
            ids.append(token)
            logprobs.append(float(logits.log_softmax(-1)[0, token]))
        return Rollout(ids, logprobs)
