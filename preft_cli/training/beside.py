"""Earlier runs that can be compared with this one: in folders beside it, same base model, same held-out rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from preft_cli.data.turn import Row
from preft_cli.rl.result import RlResult, parse_result
from preft_cli.training.measure import Measured
from preft_cli.training.output import RunFolder
from preft_cli.training.result import EarlierRun, TrainResult

NEWEST = 100
"""As many are looked at: a fleet of adapters may have thousands of runs in one folder."""
LARGEST_BYTES = 1 << 20
"""Of a result that is read; ours are a few thousand bytes."""


def rows_digest(rows: Sequence[Row]) -> str:
    """Equal if and only if the losses on the rows can be compared: the ids and where completions begin."""
    ids = [[row.prompt_ids, row.completion_ids] for row in rows]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def earlier_runs(folder: Path, base_model: str, held_out: Measured | None) -> list[EarlierRun]:
    """The comparable runs beside `folder`, by name. Whatever else lies there is passed over in silence."""
    if held_out is None or held_out.digest is None:
        return []
    found = [_read(path) for path in _newest_results(folder)]
    return [
        EarlierRun(
            folder=path.parent,
            adapter=result.adapter,
            method=result.method,
            ranks=result.ranks,
            trainable_parameters=result.trainable_parameters,
            steps=result.steps,
            held_out=result.held_out,
        )
        for path, result in sorted(filter(None, found), key=lambda one: one[0])
        if result.base_model == base_model and result.held_out and result.held_out.digest == held_out.digest
    ]


def _newest_results(folder: Path) -> list[Path]:
    dated = []
    for path in folder.parent.glob(f"*/{RunFolder(folder).result.name}"):
        try:
            status = path.stat()
        except OSError:
            continue
        if path.parent.name != folder.name and path.is_file() and status.st_size <= LARGEST_BYTES:
            dated.append((status.st_mtime, path))
    return [path for _, path in sorted(dated, reverse=True)[:NEWEST]]


def _read(path: Path) -> tuple[Path, TrainResult | RlResult] | None:
    try:
        return path, parse_result(path.read_bytes())
    except (OSError, ValueError):  # pydantic's error for what is no result is a ValueError
        return None
