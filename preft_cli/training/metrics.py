"""`metrics.jsonl`: one JSON object a line, written as the run goes.

{"kind": "train", "step": 3, "loss": 2.31, "learning_rate": 0.001, "grad_norm": 0.8, "tokens_per_s": 210.5, …}
{"kind": "eval", "step": 0, "which": "base", "loss": 3.21, "split": "held-out"}
{"kind": "eval", "step": 0, "which": "base", "accuracy": 0.21, "right": 42, "total": 200, "split": "held-out"}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_patch.store.atomic import atomic_write


class Metrics:
    """Appends rows to the file; a row is on disk when the call returns."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        """`writes`: of several processes only one does."""
        self.path = path
        self._writes = writes

    def train(self, step: int, **values: Any) -> None:
        """One logged optimizer step: numbers, or numbers by name."""
        self._append({"kind": "train", "step": step, **values})

    def evaluation(self, step: int, which: str, loss: float, split: str = "held-out") -> None:
        """One loss on the rows of `split` (held-out or validation); `which` is base or adapter."""
        self._append({"kind": "eval", "step": step, "which": which, "loss": loss, "split": split})

    def accuracy(self, step: int, which: str, right: int, total: int, split: str = "held-out") -> None:
        """How many problems of `split` were solved; `which` is base or adapter."""
        counts = {"accuracy": right / total, "right": right, "total": total}
        self._append({"kind": "eval", "step": step, "which": which, **counts, "split": split})

    def rows(self) -> list[dict[str, Any]]:
        """Everything written so far; a last line that was cut by a crash is left out."""
        if not self.path.is_file():
            return []
        return [row for line in self.path.read_text().splitlines() if (row := _parsed(line)) is not None]

    def rewind(self, step: int) -> None:
        """Forget what came after `step`: a resumed run does those steps again, and measures the base model again."""
        if not self._writes:
            return
        kept = [row for row in self.rows() if row["step"] <= step and row.get("which") != "base"]
        atomic_write(self.path, [json.dumps(row).encode() + b"\n" for row in kept])

    def _append(self, row: dict[str, Any]) -> None:
        if self._writes:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
