"""Whether the runs of a sweep can be compared, and what a reader should know of them."""

from __future__ import annotations

from collections.abc import Sequence

from preft_cli.training.sweep.result import CellResult

SAME_BASE = 1e-3
"""The base model's losses of two runs may differ by so much, as a share, before it is worth a word: rounding."""


def comparable(cells: Sequence[CellResult]) -> list[CellResult]:
    """The cells, where those that were measured on other rows than the first one have no losses, but an error.

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
            error = f"{setting} held other rows than for {first.name}: the losses do not compare; use --overwrite"
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
    bases = [cell.held_out.base for cell in done if cell.held_out]
    if bases and max(bases) - min(bases) > SAME_BASE * min(bases):
        notes.append(
            f"the base model's own loss is {min(bases):.3f} to {max(bases):.3f}, by type or quantisation: the line and the "
            f"changes are of the first run's, {bases[0]:.3f}"
        )
    shortened = {cell.held_out.dropped for cell in done if cell.held_out and cell.held_out.dropped}
    if shortened:
        notes.append(f"{max(shortened)} held-out rows were longer than train.max_length and are not counted")
    return notes
