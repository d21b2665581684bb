"""A worker of `launch` that first makes other runs in the same two processes, since starting them takes the most time.

python -m tests.unit.two_processes FOLDER        with the job on stdin, as preft_cli.training.worker
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.training import processes, session, worker
from preft_cli.training.objective import LossSum, Objective
from preft_cli.training.run import train
from tests.unit.test_training_run import stop_after


def main() -> int:
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    patch.setattr(processes, "leave", lambda: None)  # the runs share the connection
    root = Path(os.environ["PREFT_TEST_ROOT"])
    configs = {path.stem: PreftConfig.model_validate_json(path.read_text()) for path in sorted(root.glob("*.job"))}
    train(configs["ddp"], root)
    with patch.context() as broken:
        poison(broken)
        refused(configs["nan"], root, "the loss is not a finite number in step 2")
    with patch.context() as stopped:
        keep_share(stopped)
        if processes.rank() == 1:
            stop_after(stopped, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        refused(configs["fsdp"], root, "stopped at step 4 of 6; a checkpoint is saved")
    return worker.main()


def refused(config: PreftConfig, root: Path, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(config, root)


def poison(patch: pytest.MonkeyPatch) -> None:
    """In one process alone the second step (of two batches each) has no loss."""
    original, calls = Objective.__call__, []

    def poisoned(self: Objective, batch: Any, model: Any = None) -> LossSum:
        loss = original(self, batch, model)
        calls.extend([1] * (model is not None))
        bad = processes.rank() == 1 and model is not None and len(calls) == 4
        return loss._replace(total=loss.total * float("nan")) if bad else loss

    patch.setattr(Objective, "__call__", poisoned)


def keep_share(patch: pytest.MonkeyPatch) -> None:
    """Before the first step, after the base model was measured, and after the last one the base model lies there in halves."""
    original = session.Session.fit

    def fit(self: session.Session, checkpoint: Path | None) -> None:
        check(self.adapted)
        try:
            original(self, checkpoint)
        finally:
            check(self.adapted)

    def check(adapted: AdaptedModel) -> None:
        frozen = {name: p for name, p in adapted.model.named_parameters() if not p.requires_grad}
        assert not [name for name, parameter in frozen.items() if not isinstance(parameter, DTensor)]
        held = sum(parameter.to_local().numel() for parameter in frozen.values())
        assert held == sum(parameter.numel() for parameter in frozen.values()) / 2
        assert not [name for name, parameter in adapted.trainable().items() if isinstance(parameter, DTensor)]

    patch.setattr(session.Session, "fit", fit)


if __name__ == "__main__":
    sys.exit(main())
