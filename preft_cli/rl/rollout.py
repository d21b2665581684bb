"""What samples answers: an engine in this process, or a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from engine_patch.adapter import LowRankPair


class Sampling(NamedTuple):
    """How tokens are drawn; the trainer computes log-probabilities of the same distribution."""

    max_tokens: int
    temperature: float
    """0: always the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    """Tokens that end an answer."""


class Rollout(NamedTuple):
    """One sampled answer."""

    token_ids: list[int]
    """With the stop token, unless it was cut."""
    logprobs: list[float]
    """Of each token under the distribution it was drawn from: after temperature and truncation."""


class Synced(NamedTuple):
    """How new weights arrived."""

    digest: str
    """What they are known by, and every KV cache key with it."""
    seconds: float
    num_bytes: int


class Rollouts(Protocol):
    """Samples answers with the adapter's present weights."""

    def sync(self, pairs: Mapping[str, LowRankPair]) -> Synced:
        """From now on answers come from these weights, and from no KV of earlier ones.

        Raises:
            UserError: they did not arrive.
        """

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seed: int, *, adapted: bool = True
    ) -> list[list[Rollout]]:
        """`n` answers to each prompt, in order. Equal seeds give equal answers of equal weights on the same machine.

        Args:
            prompts: token ids.
            n: answers to each; they share the prompt's KV.
            sampling: see there.
            seed: of this call.
            adapted: False: answers of the base model.

        Raises:
            UserError: the engine failed.
        """

    def stop(self) -> None:
        """End what was started."""
