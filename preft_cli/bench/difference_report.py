"""The difference of two results, for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from preft_cli.bench.difference import Change, Difference
from preft_cli.bench.numbers import spread
from preft_cli.console import out

SHORT = {"requests_per_second": "req/s", "output_tokens_per_second": "tok/s"}


def print_difference(difference: Difference) -> None:
    """Print what differs in the measurement first, for it decides whether the numbers below compare at all."""
    _line(f"A: {difference.a}\nB: {difference.b}")
    if difference.settings:
        _line("\nMeasured in different ways; the numbers may not compare:")
        out.print(_settings(difference))
    for caution in difference.cautions:
        _line(f"caution: {caution}")
    out.print(_changes(difference))
    for name, missing in (("A", difference.only_a), ("B", difference.only_b)):
        if missing:
            _line(f"only in {name}: {', '.join(missing)}")
    changed = sum(change.changed for change in difference.changes)
    _line(f"{changed} of {len(difference.changes)} quantities changed: their ranges of repetitions lie apart")


def _line(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def _settings(difference: Difference) -> Table:
    made = _table("", "A", "B")
    for column in made.columns[1:]:
        column.overflow = "fold"
    for setting in difference.settings:
        made.add_row(*(Text(text) for text in (setting.name, _shown(setting.a), _shown(setting.b))))
    return made


def _changes(difference: Difference) -> Table:
    made = _table("", "A", "B", "change", "")
    for column in made.columns[1:4]:
        column.justify = "right"
    for change in difference.changes:
        style = "" if not change.changed else "green" if change.b.median > change.a.median else "red"
        made.add_row(*(Text(cell, style=style) for cell in _cells(change)))
    return made


def _cells(change: Change) -> tuple[str, ...]:
    arm, _, quantity = change.name.partition(".")
    percent = "-" if change.percent is None else f"{change.percent:+.1f}%"
    verdict = "changed" if change.changed else "within noise"
    return (f"{arm} {SHORT.get(quantity, '')}".strip(), spread(change.a), spread(change.b), percent, verdict)


def _table(*titles: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for title in titles:
        made.add_column(title)
    return made


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
