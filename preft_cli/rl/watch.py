"""Watches the steps of an RL run: a row of metrics for each, and a word when nothing is learnt or something is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preft_cli.console import say, warn
from preft_cli.errors import UserError
from preft_cli.rl.stats import Sample, StepStats
from preft_cli.training.metrics import Metrics

EVERY = 20
"""Steps before the same warning comes again."""
NEVER = 10
"""Steps without a reward above the lowest one before the reward itself is in doubt."""
GAP_LIMIT = 0.1
"""Nats. The same weights in two programs differ by about 0.01 in bfloat16, and by far less in float32."""
GAP_STOP = 1.0
"""Nats. No precision explains as much."""
FIRST_ENTROPIES = 5
COLLAPSED = 0.05
"""Of the entropy of the first steps."""


class Watcher:
    """Is given each optimizer step."""

    def __init__(self, metrics: Metrics, max_completion_length: int) -> None:
        """`metrics` of a resumed run, rewound to its checkpoint, tell what this one goes on from."""
        self._metrics = metrics
        self._max_completion_length = max_completion_length
        self._warned: dict[str, int] = {}
        self._lowest = float("inf")
        self._without_reward = 0
        self._entropies: list[float] = []
        self._collapsed = False
        for row in metrics.rows():
            if row["kind"] == "train":
                self._remember(row)

    def step(self, stats: StepStats, sample: Sample | None = None) -> str:
        """Record and judge one step; `sample` is one of its answers. Returns the note for the progress bar.

        Raises:
            UserError: trainer and engine do not compute the same model.
        """
        row = stats.row()
        self._metrics.train(**row)
        self._remember(row)
        if self._without_reward >= NEVER and self._is_due("never", stats.step):
            self._warned["tied"] = stats.step
            warn(_with_sample(self._never_fires(stats), sample))
        if stats.tied_share >= 1 and self._is_due("tied", stats.step):
            warn(_with_sample(self._all_tied(stats), sample))
        if (stats.logprob_gap_mean or 0.0) > GAP_STOP:
            raise UserError(f"{_disagree(stats)}. The run stops here")
        if (stats.logprob_gap_mean or 0.0) > GAP_LIMIT and self._is_due("gap", stats.step):
            warn(_disagree(stats))
        self._look_at_entropy(stats)
        return f"reward {stats.reward_mean:.3f}, solved {stats.solved_share:.0%}, {stats.tokens_per_s:.0f} tok/s"

    def _is_due(self, kind: str, step: int) -> bool:
        """Whether the warning comes now; then it does not come again for a while."""
        if kind in self._warned and step < self._warned[kind] + EVERY:
            return False
        self._warned[kind] = step
        return True

    def _remember(self, row: Mapping[str, Any]) -> None:
        """What later steps are compared with."""
        low, high, solved = (row.get(key) for key in ("reward_low", "reward_high", "solved_share"))
        if low is not None and high is not None:
            self._lowest = min(self._lowest, low)
            # Where all answers are right, all rewards are equal too.
            self._without_reward = self._without_reward + 1 if high <= self._lowest and not solved else 0
        entropy = row.get("entropy")
        if entropy is not None and len(self._entropies) < FIRST_ENTROPIES:
            self._entropies.append(entropy)

    def _all_tied(self, stats: StepStats) -> str:
        return (
            f"step {stats.step}: the answers to each prompt all earned the same, so nothing can be learnt from this step: "
            + self._why_tied(stats)
        )

    def _why_tied(self, stats: StepStats) -> str:
        if stats.cut_share >= 1:
            return (
                f"every answer was cut at {self._max_completion_length} tokens before its end. "
                "Raise train.grpo.max_completion_length, or ask for short answers in the prompt"
            )
        if stats.solved_share >= 1:
            return "every answer is right. These problems are too easy for this model: take harder ones"
        if stats.solved_share <= 0:
            return (
                "no answer is right. Either the problems are too hard (take easier ones, worked examples, or more "
                "train.grpo.num_generations), or the reward does not recognise right answers: compare"
            )
        return "each problem is either always or never solved. Take problems in between, or more train.grpo.num_generations"

    def _never_fires(self, stats: StepStats) -> str:
        return (
            f"in {self._without_reward} steps no answer earned more than {stats.reward_high:g}: the reward never tells answers "
            "apart, and the adapter learns nothing. Check train.grpo.rewards on this answer (does it look for another format, "
            "or for a field that the data lack?), then start with --overwrite"
        )

    def _look_at_entropy(self, stats: StepStats) -> None:
        if stats.entropy is None or self._collapsed or len(self._entropies) < FIRST_ENTROPIES:
            return
        first = sum(self._entropies) / len(self._entropies)
        if stats.entropy < COLLAPSED * first:
            self._collapsed = True
            say(
                f"note: step {stats.step}: the entropy has fallen to {stats.entropy:.4f} nats per token, from {first:.3f} in the "
                "first steps: the answers to a prompt are nearly all the same. A lower train.learning_rate, or a "
                "train.grpo.beta above 0, keeps them apart"
            )


def _disagree(stats: StepStats) -> str:
    most = "" if stats.logprob_gap_max is None else f", {stats.logprob_gap_max:.3f} at most"
    return (
        f"step {stats.step}: trainer and engine disagree: the log-probabilities of the sampled tokens differ by "
        f"{stats.logprob_gap_mean:.3f} nats on average{most}. They compute with other weights (a sync that did not arrive), "
        "another prompt mask, other precision, or another sampling distribution; what is learnt from such steps is unsound"
    )


def _with_sample(text: str, sample: Sample | None) -> str:
    return text if sample is None else f"{text}\n{sample.text()}"
