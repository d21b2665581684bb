"""Rows of a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from preft_cli.errors import UserError

BATCH = 1000
"""Rows that are Python objects at once, beside the turns."""


def parquet_records(path: Path, setting: str) -> Iterator[tuple[str, Any]]:
    """`path:row N` and each row as a record.

    Raises:
        UserError: no Parquet file, or a damaged one.
    """
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", as_record(record)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        after = f" after row {number}" if number else ""
        raise UserError(f"{setting}: {path} cannot be read as Parquet{after}: {reason}") from error


def as_record(row: dict[str, Any]) -> dict[str, Any]:
    """`row` without what a table adds to its records.

    All rows of a column have the same keys, at every depth; those that a record does not have are null. In definitions and
    calls of tools nulls are therefore left out, since templates print them. JSON text in such a column says all there is.
    """
    if isinstance(row.get("tools"), list):
        row["tools"] = _without_nulls(row["tools"])
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = _without_nulls(message["tool_calls"])
    return row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
