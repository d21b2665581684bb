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

    def __init__(self, rows: str | None = None) -> None:
        """`rows`: digest of those that are evaluated, if there are any; losses on others do not compare."""
        self.rows = rows
        self.step: int | None = None
        """None: nothing was evaluated yet."""
        self.loss = math.inf
        self.misses = 0
        """Evaluations since then, none of them better."""
        self.state: dict[str, Tensor] = {}
        """Its parameters as they are trained."""
        self.last: tuple[int, float] | None = None
        """Step and loss of the last evaluation."""

    def offer(self, step: int, loss: float, state: Callable[[], dict[str, Tensor]]) -> None:
        """One more evaluation, of the adapter whose `state` that is. A loss that is no number is no gain."""
        self.last = step, loss
        if loss < self.loss:
            self.step, self.loss, self.misses, self.state = step, loss, 0, state()
        else:
            self.misses += 1

    def save(self, folder: Path) -> None:
        """Write everything into a checkpoint."""
        about = {name: getattr(self, name) for name in ("rows", "step", "loss", "misses", "last")}
        save_file(self.state, folder / FILE, metadata={"preft": json.dumps(about)})

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            UserError: the file is missing or damaged, or its losses are of other rows.
        """
        path = folder / FILE
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["preft"])
                self.state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.step, self.loss, self.misses = about["step"], float(about["loss"]), int(about["misses"])
            self.last = tuple(about["last"]) if about["last"] else None
            other_rows = self.step is not None and about["rows"] != self.rows
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(
                f"{path} is missing or damaged, so that run cannot be continued: {error}. Start anew with --overwrite"
            ) from error
        if other_rows:
            raise UserError(
                f"--resume: {folder} was evaluated on other rows than those of train.validation_file (or else eval.file) now, "
                "so which adapter is best cannot be told. Put the rows back, or start anew with --overwrite"
            )
