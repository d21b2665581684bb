"""A store's listing as text: a table on a terminal, plain columns anywhere else."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preft_cli.store.results import StoreRow

TITLES = ("name", "method", "rank", "size", "base", "digest", "when")
_TO_THE_RIGHT = {"rank", "size"}
_AT_MOST = 500
"""Rows of a rich table: laying out ten thousand takes it twelve seconds."""


def print_rows(rows: Sequence[StoreRow]) -> None:
    """Print `rows` on stdout."""
    cells = [_cells(row) for row in rows]
    if sys.stdout.isatty() and len(rows) <= _AT_MOST:
        _print_table(cells)
        return
    cells.insert(0, TITLES)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [f"{{:{'>' if t in _TO_THE_RIGHT else '<'}{width}}}" for t, width in zip(TITLES, widths, strict=True)]
    form = "  ".join(aligned)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    # One write: ten thousand prints take longer than reading the headers does.
    sys.stdout.write("".join(form.format(*line).rstrip()[:width] + "\n" for line in cells))
    sys.stdout.flush()


def _cells(row: StoreRow) -> tuple[str, ...]:
    base = row.base.rstrip("/").rpartition("/")[2] if row.base.startswith(("/", "./", "../", "~")) else row.base
    return (row.name, row.method, str(row.rank), size(row.bytes), base, row.digest[:12], _local(row.modified))


def size(count: int) -> str:
    """`812 B`, `1.4 MB`."""
    if count < 1000:
        return f"{count} B"
    value = count / 1000
    for unit in ("kB", "MB"):
        if value < 1000:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


@lru_cache(maxsize=1024)
def _local(modified: str) -> str:
    """In this machine's time zone."""
    return datetime.fromisoformat(modified).astimezone().strftime("%Y-%m-%d %H:%M")


def _print_table(cells: Sequence[tuple[str, ...]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from preft_cli.console import out

    # What is long in itself gives way first, so that names stay readable on a narrow terminal.
    cut = {} if out.width >= 100 else {"digest": 8, "when": 10}
    left_out = set() if out.width >= 70 else {"base", "digest"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in TITLES:
        if title not in left_out:
            # Only these two are folded to fit.
            table.add_column(
                title,
                justify="right" if title in _TO_THE_RIGHT else "left",
                no_wrap=title not in ("name", "base"),
                overflow="fold",
            )
    for line in cells:
        shown = [(title, cell) for title, cell in zip(TITLES, line, strict=True) if title not in left_out]
        table.add_row(*(Text(cell[: cut.get(title)]) for title, cell in shown))
    out.print(table)
