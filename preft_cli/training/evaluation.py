"""Loss on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preft_cli.console import Progress, progress
from preft_cli.data.turn import Row
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.training.collate import Collator
from preft_cli.training.device import Precision
from preft_cli.training.objective import Objective


@dataclass(frozen=True)
class HeldOut:
    """Measures one model on the same held-out rows, as often as asked."""

    rows: Sequence[Row]
    batch_size: int
    objective: Objective
    adapted: AdaptedModel
    precision: Precision
    collate: Collator

    def base(self) -> float:
        """The base model's loss: the adapter's parts are switched off."""
        with self.adapted.disabled():
            return self.adapter("evaluating the base model")

    def adapter(self, description: str = "evaluating the adapter") -> float:
        """The loss with the adapter, shown as a phase of its own."""
        with progress(description, total=len(self.rows), unit="rows") as bar:
            return self.measure(bar)

    @torch.no_grad()
    def measure(self, bar: Progress | None = None) -> float:
        """Mean cross-entropy per completion token (nats, EOS included) over all rows, with dropout off."""
        model = self.adapted.model
        was_training = model.training
        model.eval()
        total, num_tokens = 0.0, 0
        try:
            for start in range(0, len(self.rows), self.batch_size):
                batch = self.collate(list(self.rows[start : start + self.batch_size]))
                with self.precision.autocast():
                    loss = self.objective({name: tensor.to(model.device) for name, tensor in batch.items()})
                total += loss.total.item()
                num_tokens += loss.num_tokens
                if bar:
                    bar.update(min(start + self.batch_size, len(self.rows)), note=f"loss {total / num_tokens:.3f}")
        finally:
            model.train(was_training)
        return total / num_tokens
