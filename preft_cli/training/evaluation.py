"""Loss on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preft_cli.console import Progress, progress
from preft_cli.data.turn import Row
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.training import processes
from preft_cli.training.collate import Collator
from preft_cli.training.device import Precision
from preft_cli.training.objective import Objective


@dataclass(frozen=True)
class HeldOut:
    """Measures one model on the same rows, as often as asked."""

    rows: Sequence[Row]
    batch_size: int
    objective: Objective
    adapted: AdaptedModel
    precision: Precision
    collate: Collator
    split: str = "held-out"
    """What the rows are called: held-out or validation."""

    def base(self) -> float:
        """The base model's loss: the adapter's parts are switched off."""
        with self.adapted.disabled():
            return self.adapter("evaluating the base model")

    def adapter(self, description: str = "evaluating the adapter") -> float:
        """The loss with the adapter, shown as a phase of its own."""
        with progress(f"{description} ({self.split})", total=len(self.rows), unit="rows") as bar:
            return self.measure(bar)

    @torch.no_grad()
    def measure(self, bar: Progress | None = None) -> float:
        """Mean cross-entropy per completion token (nats, EOS included) over all rows, with dropout off.

        Several processes share the batches; each gets the mean over all of them.
        """
        model = self.adapted.model
        was_training = model.training
        model.eval()
        total, num_tokens = 0.0, 0
        starts = range(0, len(self.rows), self.batch_size)
        try:
            for turn in range(0, len(starts), processes.world_size()):
                index = turn + processes.rank()
                # Where the batches run out, a process repeats one without counting it: where each process holds a share of
                # the base model, a forward pass needs all of them.
                start = starts[index] if index < len(starts) else 0
                batch = self.collate(list(self.rows[start : start + self.batch_size]))
                with self.precision.autocast():
                    loss = self.objective({name: tensor.to(model.device) for name, tensor in batch.items()})
                if index < len(starts):
                    total += loss.total.item()
                    num_tokens += loss.num_tokens
                if bar:
                    done = min((turn + processes.world_size()) * self.batch_size, len(self.rows))
                    bar.update(done, note=f"loss {total / max(num_tokens, 1):.3f}")
        finally:
            model.train(was_training)
        sums = processes.total(total, num_tokens)
        return float(sums[0] / sums[1])
