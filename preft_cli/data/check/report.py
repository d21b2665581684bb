"""The result for people: tables, one row in colour, ids beside the server's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, zip_longest

from rich.table import Table
from rich.text import Text

from preft_cli.console import out
from preft_cli.data.check.result import DataCheck, FileCheck, Leak, Lengths, Same, ServerRow, ShownRow

FIRST = 5
"""Rows that are named, of those that were dropped or occur twice."""
IDS = 24
"""Ids of a prompt that are printed."""
BAR = 30
STYLES = {
    (True, False): "black on cyan",
    (False, True): "black on green",
    (True, True): "black on yellow",
    (False, False): "",
}
"""By adapted, learnt."""


def print_check(result: DataCheck) -> None:
    """Print everything on stdout."""
    out.print(_table(result))
    for file in result.files:
        for text in _about(file):
            _line(text)
    for leak in result.leaks:
        for text in _about_leak(leak):
            _line(text)
    for text in _histograms(result.files):
        _line(text)
    _line()
    _print_row(result.row, result.method)
    _line()
    _print_server(result)


def _line(text: str | Text = "") -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(result: DataCheck) -> Table:
    table = Table("", title=f"{result.base_model}, rows of at most {result.max_length} tokens", title_justify="left")
    for file in result.files:
        table.add_column(file.setting, justify="right")
    for name, value in (
        ("conversations", lambda file: str(file.conversations)),
        ("rows (answers)", lambda file: str(file.rows)),
        ("dropped", lambda file: str(len(file.dropped))),
        ("duplicates", lambda file: str(len(file.duplicates))),
        ("share their prompt", lambda file: f"{file.sharing_prompt:.0%}"),
        ("prompt tokens", lambda file: _lengths(file.prompt)),
        ("completion tokens", lambda file: _lengths(file.completion)),
    ):
        table.add_row(name, *map(value, result.files))
    table.caption = "tokens: median / 95th percentile / longest"
    return table


def _lengths(lengths: Lengths) -> str:
    return f"{lengths.median} / {lengths.p95} / {lengths.max}"


def _about(file: FileCheck) -> Iterator[str]:
    """What is remarkable about one file."""
    yield from file.remarks
    yield from _first([f"  dropped {row.where}: {row.reason}" for row in file.dropped])
    if file.duplicates:
        yield f"{file.setting}: {len(file.duplicates)} rows are there twice, with the same prompt and completion"
        yield from _same(file.duplicates)


def _about_leak(leak: Leak) -> Iterator[str]:
    yield (
        f"{leak.held_out}: {len(leak.rows)} rows are in {leak.seen_in} too, with the same prompt and completion; "
        f"{leak.prompts} have a prompt of it"
    )
    yield from _same(leak.rows)


def _same(rows: list[Same]) -> list[str]:
    return _first([f"  {row.where} as {row.of}" for row in rows])


def _first(lines: list[str]) -> list[str]:
    return lines[:FIRST] + ([f"  … and {len(lines) - FIRST} more"] if len(lines) > FIRST else [])


def _histograms(files: list[FileCheck]) -> Iterator[str]:
    for file in files:
        yield f"{file.setting}: rows by prompt and completion tokens"
        most = max(bin_.rows for bin_ in file.histogram)
        for bin_ in file.histogram:
            yield f"  up to {bin_.up_to:>6}  {'#' * -(-bin_.rows * BAR // most)} {bin_.rows}"


def _print_row(row: ShownRow, method: str) -> None:
    """Stretches of one kind on a line each, named and coloured: readable with and without colour."""
    _line(f"{row.where}, as {method} sees it:")
    position = 0
    for (adapted, learnt), group in groupby(row.tokens, key=lambda token: (token.adapted, token.learnt)):
        tokens = list(group)
        last = position + len(tokens) - 1
        kind = (
            f"{'completion, learnt' if learnt else 'prompt'}, {'adapted' if adapted else 'masked: base weights alone'}"
        )
        _line(f"  positions {position} to {last}: {kind}")
        text = Text("    ")
        for token in tokens:
            text.append(repr(token.text)[1:-1], style=STYLES[adapted, learnt])
            text.append("·", style="dim")
        _line(text)
        position = last + 1


def _print_server(result: DataCheck) -> None:
    if result.server.not_compared:
        _line(f"prompt ids were not compared with the server's: {result.server.not_compared}")
        return
    for row in result.server.rows:
        _line(
            f"{row.where}: {len(row.ids)} prompt tokens, {'the same on the server' if row.equal else _difference(row)}"
        )
        _line(f"  training {_ids(row.ids)}")
        if row.server_ids is not None:
            _line(f"  server   {_ids(row.server_ids)}")


def _difference(row: ServerRow) -> str:
    if row.server_ids is None:
        return f"REFUSED BY THE SERVER: {row.refusal}"
    pairs = enumerate(zip_longest(row.ids, row.server_ids))
    at = next(position for position, (ours, theirs) in pairs if ours != theirs)
    return f"OTHERS ON THE SERVER ({len(row.server_ids)}), from position {at} on: do not train on this"


def _ids(ids: list[int]) -> str:
    return " ".join(map(str, ids[:IDS])) + (" …" if len(ids) > IDS else "")
