"""The best adapter of a run: its weights, its loss, and how long there has been no better one.

Transformers has both (`load_best_model_at_end`, `EarlyStoppingCallback`), but its best model lies in a checkpoint of its own
step, hence needs one at each evaluation, and its patience is restored with the flags that stopped the run. Here both are a
part of every checkpoint, so that a resumed run decides as an undisturbed one does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from preft_cli.errors import UserError

FILE = "best.safetensors"


class Best:
    """Of the adapters that were evaluated so far."""

    def __init__(self) -> None:
        self.step: int | None = None
        """None: nothing was evaluated yet."""
        self.loss = math.inf
        self.misses = 0
        """Evaluations since then, none of them better."""
        self.state: dict[str, Tensor] = {}
        """Its parameters as they are trained."""

    def offer(self, step: int, loss: float, state: Callable[[], dict[str, Tensor]]) -> None:
        """One more evaluation, of the adapter whose `state` that is. A loss that is no number is no gain."""
        if loss < self.loss:
            self.step, self.loss, self.misses, self.state = step, loss, 0, state()
        else:
            self.misses += 1

    def save(self, folder: Path) -> None:
        """Write everything into a checkpoint."""
        about = {"step": self.step, "loss": self.loss, "misses": self.misses}
        save_file(self.state, folder / FILE, metadata={"preft": json.dumps(about)})

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            UserError: the file is missing or damaged.
        """
        path = folder / FILE
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["preft"])
                self.state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.step, self.loss, self.misses = about["step"], float(about["loss"]), int(about["misses"])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(
                f"{path} is missing or damaged, so that run cannot be continued: {error}. Start anew with --overwrite"
            ) from error
