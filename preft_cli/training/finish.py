"""What a run leaves behind when its last step is done."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from engine_patch.adapter import Adapter
from engine_patch.store.atomic import atomic_write
from preft_cli.bench.machine import commit, hardware, versions
from preft_cli.config.schema import PreftConfig
from preft_cli.console import say
from preft_cli.methods import parts_of
from preft_cli.training import processes
from preft_cli.training.beside import earlier_runs, rows_digest
from preft_cli.training.foundation import Foundation
from preft_cli.training.measure import Measured
from preft_cli.training.memory import peak_memory
from preft_cli.training.output import RunFolder
from preft_cli.training.plot import plot_losses
from preft_cli.training.result import HeldOutLoss, LastAdapter, TrainResult
from preft_cli.training.session import Session
from preft_cli.training.splits import HELD_OUT, VALIDATION


def finish(session: Session) -> TrainResult:
    """Choose the adapter that is kept, measure and save it, draw the curve, write result.json."""
    last = _last(session)
    kept = session.keep()
    losses = {name: _measured(session, name, kept) for name in session.splits}
    if session.chosen_on == HELD_OUT:
        say(
            "the held-out rows also decided which adapter is kept, which flatters it: "
            "give the rows for that decision as train.validation_file"
        )
    held_out = losses[HELD_OUT].model_dump() if HELD_OUT in losses else None
    adapter = session.save(session.folder.adapter, kept, held_out_loss=held_out)
    result = _result(session, losses, adapter, kept, last)
    if processes.is_main():
        title = f"{session.config.adapter.name} on {session.config.model.base}"
        plot_losses(session.metrics.rows(), session.folder.plot, title, kept)
        atomic_write(session.folder.result, [result.model_dump_json(indent=2).encode() + b"\n"])
    return result


def _last(session: Session) -> LastAdapter | None:
    """The losses of the adapter of the last step, where another one will be kept."""
    step, names = session.step, list(session.splits)
    if session.kept_step == step:
        return None
    losses = {name: session.splits.adapter(name, step) for name in names}
    return LastAdapter(step=step, validation=losses.get(VALIDATION), held_out=losses.get(HELD_OUT))


def _measured(session: Session, name: str, step: int) -> HeldOutLoss:
    """The loss on one split with the adapter in place, which is that of `step`, beside the base model's."""
    data = session.prepared.held_out if name == HELD_OUT else session.prepared.validation
    assert data is not None
    measured = HeldOutLoss(
        base=session.splits.base(name),
        adapter=session.splits.adapter(name, step),
        rows=len(data.rows),
        dropped=data.dropped,
        digest=rows_digest(data.rows),
    )
    say(measured.line(name))
    return measured


def _result(
    session: Session, losses: dict[str, HeldOutLoss], adapter: Adapter, kept: int, last: LastAdapter | None
) -> TrainResult:
    config, prepared, trainer, folder = session.config, session.prepared, session.trainer, session.folder
    logged = [row for row in session.metrics.rows() if row["kind"] == "train"]
    held_out, tokens = losses.get(HELD_OUT), int(processes.total(trainer.tokens_seen))
    return TrainResult(
        **about_run(config, prepared, folder, adapter, held_out, {"loss curve": folder.plot}),
        steps=session.step,
        epochs=trainer.state.epoch or 0.0,
        rows=len(prepared.train.rows),
        dropped=prepared.train.dropped,
        train_loss=logged[-1]["loss"] if logged else None,
        held_out=held_out,
        validation=losses.get(VALIDATION),
        chosen_on=session.chosen_on,
        kept_step=kept,
        best_step=session.best.step,
        stopped_early=session.stopped_early,
        last=last,
        tokens=tokens,
        tokens_per_s=round(tokens / session.step_seconds, 1) if session.step_seconds else 0.0,
        seconds=round(session.seconds, 1),
    )


def about_run(
    config: PreftConfig,
    prepared: Foundation,
    folder: RunFolder,
    adapter: Adapter,
    held_out: Measured | None,
    pictures: dict[str, Path],
) -> dict[str, Any]:
    """The fields of `RunResult` that do not depend on what the run learnt from."""
    ranks, parameters = _by_part(adapter)
    return {
        "adapter": config.adapter.name,
        "method": config.adapter.method,
        "base_model": prepared.base.name,
        "digest": adapter.digest(),
        "trainable_parameters": sum(parameters.values()),
        "ranks": ranks,
        "parameters": parameters,
        "num_processes": processes.world_size(),
        "peak_memory": processes.largest(peak_memory(prepared.precision.device)),
        "device": prepared.precision.device,
        "dtype": prepared.precision.name,
        "seed": config.project.seed,
        "artefacts": {
            "adapter": folder.adapter,
            **pictures,
            "metrics": folder.metrics,
            **({"tensorboard": folder.tensorboard} if "tensorboard" in prepared.boards else {}),
            "config": folder.config,
            "result": folder.result,
        },
        "config": config.model_dump(mode="json"),
        "versions": versions() | {name: metadata.version(name) for name in ("peft", "accelerate")},
        "hardware": hardware(),
        "git_commit": commit(),
        "beside": earlier_runs(folder.path, prepared.base.name, held_out),
    }


def _by_part(adapter: Adapter) -> tuple[dict[str, int], dict[str, int]]:
    """Ranks and numbers of parameters."""
    held = {
        part.name: [pair for name, pair in adapter.pairs.items() if part.holds(name)]
        for part in parts_of(adapter.method)
    }
    ranks = {part: max(pair.rank for pair in pairs) for part, pairs in held.items()}
    return ranks, {part: sum(t.numel() for p in pairs for t in p.tensors.values()) for part, pairs in held.items()}
