"""Whether the runs of a sweep can be compared, and what a reader should know of them."""

from __future__ import annotations

from collections.abc import Sequence

from preft_cli.rl.accuracy import HeldOutAccuracy
from preft_cli.training.sweep.result import CellResult

SAME_BASE = 1e-3
"""What two runs measure of the base model may differ by so much, as a share, before it is worth a word: rounding."""


def comparable(cells: Sequence[CellResult]) -> list[CellResult]:
    """The cells, where those that were measured on other rows than the first one have no numbers, but an error.

    Rows differ if a file was changed between a sweep and its --resume.
    """
    first = next((cell for cell in cells if cell.held_out), None)
    return [_judged(cell, first) if first else cell for cell in cells]


def _judged(cell: CellResult, first: CellResult) -> CellResult:
    for setting, one, other in (
        ("eval.file", cell.held_out, first.held_out),
        ("train.validation_file", cell.validation, first.validation),
    ):
        if one and other and one.digest != other.digest:
            what = one.measure.name
            held = "the held-out problems are others" if what == "accuracy" else f"{setting} held other rows"
            error = f"{held} than for {first.name}: there is no comparing them; use --overwrite"
            return cell.model_copy(update={"held_out": None, "validation": None, "error": error})
    return cell


def notes_of(cells: Sequence[CellResult]) -> list[str]:
    """Differences between runs that nobody swept."""
    done = [cell for cell in cells if cell.error is None]
    differing = {
        "commits of preft": {cell.git_commit for cell in done},
        "devices": {cell.device for cell in done},
    }
    notes = [
        f"the runs are of several {what}: {', '.join(sorted(map(str, of)))}"
        for what, of in differing.items()
        if len(of) > 1
    ]
    measured = [cell.held_out for cell in done if cell.held_out]
    bases = [one.base_value for one in measured]
    if bases and max(bases) - min(bases) > SAME_BASE * min(bases):
        measure = measured[0].measure
        low, high, first = (measure.text(value) for value in (min(bases), max(bases), bases[0]))
        why = "by type or quantisation" if measure.name == "loss" else "by type, sampling or the length of answers"
        notes.append(
            f"the base model's own {measure.name} is {low} to {high}, {why}: the line and the changes are of the first "
            f"run's, {first}"
        )
    if shortened := max((one.dropped for one in measured), default=0):
        notes.append(f"{shortened} held-out rows were longer than train.max_length and are not counted")
    return notes + _constant_notes(done)


def _constant_notes(done: Sequence[CellResult]) -> list[str]:
    """A gain that answering always the same would have too is none."""
    measured = [cell.held_out for cell in done if isinstance(cell.held_out, HeldOutAccuracy)]
    beaten = [one for one in measured if one.constant and not one.beats_constant]
    if not beaten:
        return []
    assert beaten[0].constant
    return [
        f"{len(beaten)} of {len(measured)} runs solve no more than the best constant answer, {beaten[0].constant.text()}"
    ]
