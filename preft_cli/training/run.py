"""`preft train`: from a config to a trained adapter and its numbers."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

from preft_cli.config.schema import PreftConfig
from preft_cli.console import say
from preft_cli.errors import UserError
from preft_cli.threads import wait_politely
from preft_cli.training import processes
from preft_cli.training.lock import only_writer
from preft_cli.training.output import RunFolder
from preft_cli.training.plan import as_launched, setting_problems
from preft_cli.training.result import TrainResult

if TYPE_CHECKING:
    from preft_cli.rl.prepare import PreparedRl
    from preft_cli.rl.result import RlResult
    from preft_cli.training.prepare import Prepared
    from preft_cli.training.session import Session
    from preft_cli.training.trainer import NonFiniteError


def train(
    config: PreftConfig,
    root: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    prepared: Prepared | PreparedRl | None = None,
) -> TrainResult | RlResult:
    """Train the adapter of `config`; relative paths in it start at `root`. `prepared` is from `prepare(config, root)`, or of
    `train.task: grpo` from `prepare_rl`.

    Leaves in the output folder: the resolved config, metrics.jsonl, loss.png, adapter/, checkpoints/ and result.json.

    Raises:
        UserError: bad data or settings (before any weights are loaded), an output folder that is in use, a loss that is
            not a number, or Ctrl-C (after saving a checkpoint that `resume` continues from).
    """
    config = as_launched(config)
    if problems := setting_problems(config):
        raise UserError("\n".join(problems), exit_code=2)
    # Hugging Face's libraries report usage unless told otherwise, and read this when they are first imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    wait_politely()
    folder = RunFolder((root / config.output_dir).absolute())
    launches = config.train.num_processes > processes.world_size()
    # What this process starts writes in its place.
    writes = processes.is_main() and not launches
    with only_writer(folder.path) if writes else nullcontext(), processes.quiet_others():
        if processes.is_main():
            folder.check(config, resume=resume, overwrite=overwrite)
        # In each process: one that went on alone would wait for the others.
        if resume and folder.is_finished(config):
            if processes.is_main():
                say(f"{folder.path} is finished: nothing to resume")
            return folder.read_result()
        if config.train.task == "grpo":
            from preft_cli.rl.run import train_rl

            return train_rl(config, root, folder, resume=resume, prepared=cast("PreparedRl | None", prepared))
        if not launches:
            return _train(config, root, folder, resume=resume, prepared=cast("Prepared | None", prepared))
    from preft_cli.training.launch import launch

    launch(config, root, resume=resume, overwrite=overwrite)
    return folder.read_result()


def _train(
    config: PreftConfig, root: Path, folder: RunFolder, *, resume: bool, prepared: Prepared | None
) -> TrainResult:
    """In one of the processes of the run."""
    from preft_cli.training.prepare import prepare
    from preft_cli.training.session import Session

    prepared = prepared or prepare(config, root)
    checkpoint = None
    if processes.is_main():
        folder.prepare(config, resume=resume)
        checkpoint = folder.last_checkpoint() if resume else None
        if resume:
            say(f"resuming from {checkpoint}" if checkpoint else "no checkpoint to resume from: starting at step 0")
    try:
        session = Session(config, prepared, folder)
        return _run(session, processes.from_main(checkpoint))
    finally:
        processes.leave()


def _run(session: Session, checkpoint: Path | None) -> TrainResult:
    from preft_cli.training.finish import finish
    from preft_cli.training.interrupt import InterruptedRunError, stopped
    from preft_cli.training.trainer import NonFiniteError

    session.metrics.rewind(int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0)
    session.splits.measure_base()
    try:
        session.fit(checkpoint)
    except NonFiniteError as error:
        raise UserError(_keep_last_good(session, error)) from error
    except InterruptedRunError as stop:
        raise stopped(stop, session.folder.checkpoints) from stop
    return finish(session)


def _keep_last_good(session: Session, error: NonFiniteError) -> str:
    """Save the best adapter, or else the one before the step that failed, and say what to do."""
    advice = (
        "Lower train.learning_rate or train.max_grad_norm, or raise train.warmup_ratio; then start with --overwrite."
    )
    if session.step == 0:
        return f"training stopped: {error}; no step was taken, so there is no adapter. {advice}"
    kept = session.keep()
    session.save(session.folder.adapter, kept, stopped=str(error))
    best = " (the best one so far)" if kept != session.step else ""
    return f"training stopped: {error}. The adapter of step {kept} is kept in {session.folder.adapter}{best}. {advice}"
