"""The share of held-out problems that are solved, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import ConfigDict, Field

from preft_cli.bench.results import Record
from preft_cli.rl.intervals import paired_difference, wilson
from preft_cli.training.measure import ACCURACY, Measure, Measured


class Accuracy(Record):
    """Right answers to problems, one answer each."""

    right: int
    total: int
    value: float
    low: float = Field(description="Wilson's 95% interval.")
    high: float

    @classmethod
    def of(cls, right: int, total: int) -> Accuracy:
        """Of at least one problem."""
        low, high = wilson(right, total)
        return cls(right=right, total=total, value=right / total, low=low, high=high)

    def text(self) -> str:
        """`31.0% (25.0-37.7)`."""
        return f"{self.value:.1%} ({100 * self.low:.1f}-{100 * self.high:.1f})"


class Difference(Record):
    """The adapter's accuracy less the base model's, on the same problems."""

    value: float
    low: float = Field(description="Newcombe's 95% interval for paired shares.")
    high: float
    only_adapter: int = Field(description="Problems that the adapter alone solves.")
    only_base: int

    @classmethod
    def of(cls, base: Sequence[bool], adapter: Sequence[bool]) -> Difference:
        """From which problems each solves."""
        pairs = list(zip(adapter, base, strict=True))
        both, first, second = (pairs.count(kind) for kind in ((True, True), (True, False), (False, True)))
        low, high = paired_difference(both, first, second, len(pairs) - both - first - second)
        return cls(value=(first - second) / len(pairs), low=low, high=high, only_adapter=first, only_base=second)

    def text(self) -> str:
        """`+24.0 points (+17.1 to +30.6)`."""
        return f"{100 * self.value:+.1f} points ({100 * self.low:+.1f} to {100 * self.high:+.1f})"


class ConstantAnswer(Record):
    """The one answer that solves most problems, whatever is asked."""

    answer: str
    accuracy: Accuracy

    def text(self) -> str:
        """`'yes': 52.0% (45.1-58.8)`."""
        shown = self.answer if len(self.answer) <= 40 else self.answer[:37] + "..."
        return f"{shown!r}: {self.accuracy.text()}"


class HeldOutAccuracy(Measured):
    """Of the base model and of the adapter, on the same held-out problems."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    measure: ClassVar[Measure] = ACCURACY
    base: Accuracy
    adapter: Accuracy
    difference: Difference
    constant: ConstantAnswer | None = Field(
        description="What the best constant answer solves; None where answers are not compared with a right one."
    )

    @classmethod
    def of(
        cls,
        base: Sequence[bool],
        adapter: Sequence[bool],
        *,
        digest: str,
        dropped: int = 0,
        constant: tuple[str, int] | None = None,
    ) -> HeldOutAccuracy:
        """From which problems each solves, in the same order.

        Args:
            base: of the base model.
            adapter: of the adapter.
            digest: of the problems (see `Asked.digest`).
            dropped: problems that were too long.
            constant: the best constant answer, and how many problems it solves.
        """
        total = len(base)
        return cls(
            base=Accuracy.of(sum(base), total),
            adapter=Accuracy.of(sum(adapter), total),
            difference=Difference.of(base, adapter),
            constant=ConstantAnswer(answer=constant[0], accuracy=Accuracy.of(constant[1], total)) if constant else None,
            rows=total,
            dropped=dropped,
            digest=digest,
        )

    @property
    def base_value(self) -> float:
        return self.base.value

    @property
    def adapter_value(self) -> float:
        return self.adapter.value

    @property
    def beats_constant(self) -> bool:
        """Whether the adapter solves more than answering always the same."""
        return self.constant is None or self.adapter.right > self.constant.accuracy.right

    def summary(self) -> str:
        constant = f"; best constant answer {self.constant.text()}" if self.constant else ""
        return f"base {self.base.text()}, adapter {self.adapter.text()}, {self.difference.text()}{constant}"
