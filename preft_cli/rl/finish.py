"""What an RL run leaves behind when its last step is done."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from engine_patch.adapter import Adapter
from engine_patch.store.atomic import atomic_write
from preft_cli.console import say
from preft_cli.rl.accuracy import HeldOutAccuracy
from preft_cli.rl.plot import plot_run
from preft_cli.rl.problem import Problems
from preft_cli.rl.result import RlResult
from preft_cli.rl.rewards.verifiers import best_constant
from preft_cli.rl.session import RlSession
from preft_cli.rl.summary import RunSummary
from preft_cli.training.finish import about_run

PACKAGES = ("trl", "math-verify", "reasoning-gym")
"""They are a part of what is learnt: the loss, the rewards, the problems."""


def finish(session: RlSession) -> RlResult:
    """Measure and save the adapter, draw the curves, write result.json."""
    held_out = _measured(session)
    folder, config, prepared = session.folder, session.config, session.prepared
    about = {"held_out_accuracy": held_out.model_dump(mode="json")} if held_out else {}
    adapter = session.save(folder.adapter, **about)
    result = _result(session, adapter, held_out)
    title = f"{config.adapter.name} ({config.adapter.method}) on {prepared.title}, {config.model.base}"
    plot_run(session.metrics.rows(), folder.curves, title, held_out)
    atomic_write(folder.result, [result.model_dump_json(indent=2).encode() + b"\n"])
    return result


def _measured(session: RlSession) -> HeldOutAccuracy | None:
    """Of the adapter as it is now, beside the base model and the best constant answer."""
    if session.held_out is None:
        return None
    asked, prepared = session.held_out.asked, session.prepared
    constant = best_constant(Problems(prepared.train.problems, asked.problems), prepared.rewards[0][0])
    assert session.base_solved is not None  # measured before the first step
    measured = HeldOutAccuracy.of(
        session.base_solved,
        session.solved(),
        digest=asked.digest,
        dropped=asked.dropped,
        constant=(constant[0], round(constant[1] * len(asked.problems))) if constant else None,
    )
    say(measured.line())
    return measured


def _result(session: RlSession, adapter: Adapter, held_out: HeldOutAccuracy | None) -> RlResult:
    folder, prepared = session.folder, session.prepared
    about = about_run(session.config, prepared, folder, adapter, held_out, {"curves": folder.curves})
    about["versions"] |= {name: metadata.version(name) for name in PACKAGES if find_spec(name.replace("-", "_"))}
    return RlResult(
        **about,
        steps=session.step,
        epochs=session.trainer.state.epoch or 0.0,
        rows=len(prepared.train.problems),
        dropped=prepared.train.dropped,
        held_out=held_out,
        seconds=round(session.seconds, 1),
        summary=RunSummary.of(session.metrics.rows()),
    )
