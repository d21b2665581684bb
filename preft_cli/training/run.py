"""`preft train`: from a config to a trained adapter and its numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from preft_cli.config.schema import PreftConfig
from preft_cli.console import say
from preft_cli.errors import UserError
from preft_cli.threads import wait_politely
from preft_cli.training.output import RunFolder
from preft_cli.training.plan import name_problem
from preft_cli.training.result import TrainResult

if TYPE_CHECKING:
    from preft_cli.training.prepare import Prepared
    from preft_cli.training.session import Session
    from preft_cli.training.trainer import NonFiniteError


def train(
    config: PreftConfig,
    root: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    prepared: Prepared | None = None,
) -> TrainResult:
    """Train the adapter of `config`; relative paths in it start at `root`. `prepared` is from `prepare(config, root)`.

    Leaves in the output folder: the resolved config, metrics.jsonl, loss.png, adapter/, checkpoints/ and result.json.

    Raises:
        UserError: bad data or settings (before any weights are loaded), an output folder that is in use, a loss that is
            not a number, or Ctrl-C (after saving a checkpoint that `resume` continues from).
    """
    if problem := name_problem(config):
        raise UserError(problem, exit_code=2)
    # Hugging Face's libraries report usage unless told otherwise, and read this when they are first imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    wait_politely()
    folder = RunFolder((root / config.output_dir).absolute())
    folder.check(config, resume=resume, overwrite=overwrite)
    if resume and folder.is_finished(config):
        say(f"{folder.path} is finished: nothing to resume")
        return TrainResult.model_validate_json(folder.result.read_text())

    from preft_cli.training.prepare import prepare
    from preft_cli.training.session import Session

    prepared = prepared or prepare(config, root)
    folder.prepare(config, resume=resume)
    checkpoint = folder.last_checkpoint() if resume else None
    if resume:
        say(f"resuming from {checkpoint}" if checkpoint else "no checkpoint to resume from: starting at step 0")
    return _run(Session(config, prepared, folder), checkpoint)


def _run(session: Session, checkpoint: Path | None) -> TrainResult:
    from preft_cli.training.finish import finish
    from preft_cli.training.interrupt import InterruptedRunError
    from preft_cli.training.trainer import NonFiniteError

    session.metrics.rewind(int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0)
    base_loss = session.held_out.base() if session.held_out else None
    if base_loss is not None:
        session.metrics.evaluation(0, "base", base_loss)
    try:
        session.fit(checkpoint)
    except NonFiniteError as error:
        raise UserError(_keep_last_good(session, error)) from error
    except InterruptedRunError as stop:
        raise UserError(
            f"stopped {stop}; a checkpoint is saved in {session.folder.checkpoints}. "
            "`preft train --resume` continues from there."
        ) from stop
    return finish(session, base_loss)


def _keep_last_good(session: Session, error: NonFiniteError) -> str:
    """Save the adapter as it was before the step that failed, and say what to do."""
    advice = (
        "Lower train.learning_rate or train.max_grad_norm, or raise train.warmup_ratio; then start with --overwrite."
    )
    if session.step == 0:
        return f"training stopped: {error}; no step was taken, so there is no adapter. {advice}"
    session.save(session.folder.adapter, stopped=str(error))
    return (
        f"training stopped: {error}. The adapter of step {session.step} is kept in {session.folder.adapter}. {advice}"
    )
