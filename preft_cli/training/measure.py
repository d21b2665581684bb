"""What tells runs apart: a number measured on held-out rows or problems, before training and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Literal["loss", "accuracy"]


@dataclass(frozen=True)
class Measure:
    """How values of one kind are read."""

    name: Name
    unit: str
    """Of the picture's axis."""
    higher_is_better: bool

    @property
    def held_out(self) -> str:
        """`held-out loss`."""
        return f"held-out {self.name}"

    def text(self, value: float) -> str:
        """`3.051`, or `31.2%`."""
        return f"{value:.1%}" if self.name == "accuracy" else f"{value:.3f}"

    def change(self, value: float, base: float) -> str:
        """From the base model: a loss relative to its own (`-12.5%`), an accuracy in points (`+12.5 pts`)."""
        if self.name == "accuracy":
            return f"{100 * (value - base):+.1f} pts"
        return f"{value / base - 1:+.1%}" if base else "-"

    def order(self, value: float) -> float:
        """Sorts the best value first."""
        return -value if self.higher_is_better else value


LOSS = Measure("loss", "nats per completion token", higher_is_better=False)
ACCURACY = Measure("accuracy", "share of problems solved", higher_is_better=True)
MEASURES: dict[Name, Measure] = {measure.name: measure for measure in (LOSS, ACCURACY)}


class Measured(BaseModel):
    """The base model and the adapter on the same rows."""

    model_config = ConfigDict(frozen=True)

    measure: ClassVar[Measure]
    rows: int
    dropped: int = Field(description="Rows longer than train.max_length.")
    digest: str | None = Field(None, description="Of the rows' token ids: equal for runs that can be compared.")

    @property
    def base_value(self) -> float:
        """The base model's."""
        raise NotImplementedError

    @property
    def adapter_value(self) -> float:
        """The adapter's."""
        raise NotImplementedError

    def summary(self) -> str:
        """For people, without a name."""
        raise NotImplementedError

    def line(self, split: str = "held-out") -> str:
        """For people."""
        return f"{split} {self.measure.name}: {self.summary()}"
