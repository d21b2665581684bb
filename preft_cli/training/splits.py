"""The rows that are measured and not trained on: the validation rows that choose, and the held-out rows that tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from preft_cli.training.evaluation import HeldOut
from preft_cli.training.metrics import Metrics

HELD_OUT, VALIDATION = "held-out", "validation"


class Splits:
    """Each is measured once for each state of the adapter, and every number is recorded."""

    def __init__(
        self, measured: Mapping[str, HeldOut], metrics: Metrics, log: Callable[[dict[str, float]], None]
    ) -> None:
        """`log` sends numbers to the boards."""
        self._measured = dict(measured)
        self._metrics = metrics
        self._log = log
        self._base: dict[str, float] = {}
        self._losses: dict[tuple[str, int], float] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._measured)

    @property
    def choosing(self) -> str | None:
        """The split that decides which adapter is best; the held-out rows must serve where there are no others."""
        return next((name for name in (VALIDATION, HELD_OUT) if name in self._measured), None)

    def measure_base(self) -> None:
        """The base model's losses, before the first step."""
        for name, split in self._measured.items():
            loss = self._base[name] = split.base()
            self._metrics.evaluation(0, "base", loss, name)
            self._log({f"eval_{name}_loss": loss})

    def base(self, name: str) -> float:
        """The base model's loss."""
        return self._base[name]

    def adapter(self, name: str, step: int, *, while_training: bool = False) -> float:
        """The loss with the adapter as it is now, which is that of `step`."""
        if (name, step) not in self._losses:
            split = self._measured[name]
            loss = self._losses[name, step] = split.measure() if while_training else split.adapter()
            self._metrics.evaluation(step, "adapter", loss, name)
            self._log({f"eval_{name}_loss": loss})
        return self._losses[name, step]

    def remember(self, name: str, step: int, loss: float) -> None:
        """A loss that was measured and recorded before this run was resumed."""
        self._losses[name, step] = loss
