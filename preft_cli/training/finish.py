"""What a run leaves behind when its last step is done."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from engine_patch.adapter import Adapter
from preft_cli.bench.machine import commit, hardware, versions
from preft_cli.console import say
from preft_cli.methods import parts_of
from preft_cli.training.beside import earlier_runs, rows_digest
from preft_cli.training.output import write_text
from preft_cli.training.plot import plot_losses
from preft_cli.training.result import HeldOutLoss, TrainResult
from preft_cli.training.session import Session


def finish(session: Session, base_loss: float | None) -> TrainResult:
    """Measure the adapter, save it, draw the curve, write result.json."""
    held_out, validation = _held_out(session, base_loss), _validation(session)
    losses = held_out.model_dump() if held_out else None
    adapter = session.save(session.folder.adapter, held_out_loss=losses)
    rows = session.metrics.rows()
    plot_losses(rows, session.folder.plot, title=f"{session.config.adapter.name} on {session.config.model.base}")
    result = _result(session, held_out, validation, adapter, [row for row in rows if row["kind"] == "train"])
    write_text(session.folder.result, result.model_dump_json(indent=2) + "\n")
    return result


def _held_out(session: Session, base_loss: float | None) -> HeldOutLoss | None:
    if session.held_out is None or base_loss is None or session.prepared.held_out is None:
        return None
    loss = session.held_out.adapter()
    session.metrics.evaluation(session.step, "adapter", loss)
    data = session.prepared.held_out
    digest = rows_digest(data.rows)
    measured = HeldOutLoss(base=base_loss, adapter=loss, rows=len(data.rows), dropped=data.dropped, digest=digest)
    say(measured.line())
    return measured


def _validation(session: Session) -> HeldOutLoss | None:
    data = session.prepared.validation
    if session.validation is None or data is None:
        return None
    base, loss = session.validation.base(), session.validation.adapter()
    return HeldOutLoss(
        base=base, adapter=loss, rows=len(data.rows), dropped=data.dropped, digest=rows_digest(data.rows)
    )


def _result(
    session: Session,
    held_out: HeldOutLoss | None,
    validation: HeldOutLoss | None,
    adapter: Adapter,
    logged: list[dict[str, Any]],
) -> TrainResult:
    config, prepared, trainer, folder = session.config, session.prepared, session.trainer, session.folder
    ranks, parameters = _by_part(adapter)
    return TrainResult(
        adapter=config.adapter.name,
        method=config.adapter.method,
        base_model=prepared.base.name,
        digest=adapter.digest(),
        steps=session.step,
        epochs=trainer.state.epoch or 0.0,
        rows=len(prepared.train.rows),
        dropped=prepared.train.dropped,
        train_loss=logged[-1]["loss"] if logged else None,
        held_out=held_out,
        validation=validation,
        trainable_parameters=sum(parameters.values()),
        ranks=ranks,
        parameters=parameters,
        tokens=trainer.tokens_seen,
        tokens_per_s=round(trainer.tokens_seen / session.seconds, 1) if session.seconds else 0.0,
        seconds=round(session.seconds, 1),
        device=prepared.precision.device,
        dtype=prepared.precision.name,
        seed=config.project.seed,
        artefacts={
            "adapter": folder.adapter,
            "loss curve": folder.plot,
            "metrics": folder.metrics,
            "config": folder.config,
            "result": folder.result,
        },
        config=config.model_dump(mode="json"),
        versions=versions() | {name: metadata.version(name) for name in ("peft", "accelerate")},
        hardware=hardware(),
        git_commit=commit(),
        beside=earlier_runs(folder.path, prepared.base.name, held_out),
    )


def _by_part(adapter: Adapter) -> tuple[dict[str, int], dict[str, int]]:
    """Ranks and numbers of parameters."""
    held = {
        part.name: [pair for name, pair in adapter.pairs.items() if part.holds(name)]
        for part in parts_of(adapter.method)
    }
    ranks = {part: max(pair.rank for pair in pairs) for part, pairs in held.items()}
    return ranks, {part: sum(t.numel() for p in pairs for t in p.tensors.values()) for part, pairs in held.items()}
