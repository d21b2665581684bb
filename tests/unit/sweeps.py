"""Grids and results of cells for tests of sweeps that train nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from preft_cli.bench.results import Hardware
from preft_cli.config.schema import PreftConfig
from preft_cli.training.result import HeldOutLoss
from preft_cli.training.sweep.cell import failed
from preft_cli.training.sweep.grid import Cell, Grid, parse_grid
from preft_cli.training.sweep.result import CellResult, SweepResult
from preft_cli.training.sweep.summary import points_of

SECTIONS: dict[str, Any] = {"train": {"validation_file": "validation.jsonl"}, "eval": {"file": "heldout.jsonl"}}
CONFIG = PreftConfig.model_validate(SECTIONS)
RL_CONFIG = PreftConfig.model_validate({"train": {"task": "grpo", "grpo": {"environment": "gcd"}}})


def grid(*sweeps: str, choose: tuple[str, ...] = (), config: PreftConfig = CONFIG) -> Grid:
    return parse_grid(list(sweeps), list(choose), config)


def loss(adapter: float, digest: str = "rows") -> HeldOutLoss:
    return HeldOutLoss(base=4.0, adapter=adapter, rows=10, dropped=0, digest=digest)


def results(of: Grid, losses: Callable[[Cell], tuple[float, float] | None]) -> list[CellResult]:
    """What the cells of a grid came to, by (validation, held-out) losses; None: it failed."""
    made = []
    for cell in of.cells:
        config, found = cell.config, losses(cell)
        known: dict[str, Any] = {"error": "it failed"}
        if found:
            parameters = 1000 * config.adapter.rank
            known = {
                "validation": loss(found[0]),
                "held_out": loss(found[1]),
                "trainable_parameters": parameters,
                "steps": 5,
            }
        about = {"method": config.adapter.method, "rank": config.adapter.rank, "seed": config.project.seed}
        made.append(CellResult(name=cell.name, settings=cell.settings, **about, **known))
    return made


def swept(of: Grid, cells: list[CellResult]) -> SweepResult:
    return SweepResult(
        created=datetime(2026, 5, 14, tzinfo=UTC),
        command="preft train",
        base_model="owner/model",
        base=4.0,
        swept=of.swept,
        choose=list(of.choose),
        complete=True,
        cells=cells,
        points=points_of(of, cells),
        notes=[],
        config=of.config.model_dump(mode="json"),
        versions={},
        hardware=Hardware(cpu="a CPU", cores=2, memory_gib=8.0, gpus=[]),
        git_commit=None,
        seconds=1.0,
        jobs=1,
    )


def serve_and_die(pipe: Any, root: Path, environment: dict[str, str], resume: bool) -> None:
    """In place of a worker: the second cell that it is given is the end of it."""
    pipe.send(None)
    pipe.send(failed(pipe.recv(), "done before the end"))
    if pipe.recv().config.train.max_steps == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(7)


def never_ready(pipe: Any, root: Path, environment: dict[str, str], resume: bool) -> None:
    """In place of a worker that cannot be started."""
    raise SystemExit(1)
