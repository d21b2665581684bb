"""`preft train` with `train.task: grpo`: from problems and rewards to an adapter and its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from preft_cli.config.schema import PreftConfig
from preft_cli.console import say
from preft_cli.errors import UserError
from preft_cli.rl.prepare import PreparedRl, prepare_rl
from preft_cli.rl.result import RlResult
from preft_cli.training.output import RunFolder

if TYPE_CHECKING:
    from preft_cli.rl.session import RlSession
    from preft_cli.training.trainer import NonFiniteError


def train_rl(
    config: PreftConfig, root: Path, folder: RunFolder, *, resume: bool, prepared: PreparedRl | None
) -> RlResult:
    """The run of `config` in `folder`, which has been checked.

    Raises:
        UserError: as `preft_cli.training.run.train`.
    """
    prepared = prepared or prepare_rl(config, root)
    from preft_cli.rl.session import RlSession, start_rollouts
    from preft_cli.rl.upstream import check_trl

    check_trl()
    folder.prepare(config, resume=resume)
    checkpoint = folder.last_checkpoint() if resume else None
    if resume:
        say(f"resuming from {checkpoint}" if checkpoint else "no checkpoint to resume from: starting at step 0")
    rollouts = start_rollouts(config, prepared)
    try:
        return _run(RlSession(config, prepared, folder, rollouts, resumed_at=checkpoint), checkpoint)
    finally:
        rollouts.stop()


def _run(session: RlSession, checkpoint: Path | None) -> RlResult:
    from preft_cli.rl.finish import finish
    from preft_cli.training.interrupt import InterruptedRunError, stopped
    from preft_cli.training.trainer import NonFiniteError

    session.measure_base()
    try:
        session.fit(checkpoint)
    except NonFiniteError as error:
        raise UserError(_keep_last_good(session, error)) from error
    except InterruptedRunError as stop:
        raise stopped(stop, session.folder.checkpoints) from stop
    except UserError as error:  # of the engine, or of a reward
        if step := session.checkpoint():
            raise UserError(
                f"{error}\nA checkpoint of step {step} is saved; `preft train --resume` goes on from there."
            ) from error
        raise
    return finish(session)


def _keep_last_good(session: RlSession, error: NonFiniteError) -> str:
    """Save the adapter as it was before the step that failed, and say what to do."""
    advice = "Lower train.learning_rate, or raise train.warmup_ratio or train.grpo.beta; then start with --overwrite."
    if session.step == 0:
        return f"training stopped: {error}; no step was taken, so there is no adapter. {advice}"
    session.save(session.folder.adapter, stopped=str(error))
    return (
        f"training stopped: {error}. The adapter of step {session.step} is kept in {session.folder.adapter}. {advice}"
    )
