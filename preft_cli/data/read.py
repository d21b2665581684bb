"""Data files to turns or problems, with every error of a file at once. JSONL and Parquet on this machine, or the Hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from preft_cli.data.formats import EXPECTED, NO_PROMPT, turns_of
from preft_cli.data.found import FormatError, parse_json
from preft_cli.data.turn import Turn
from preft_cli.errors import UserError

MAX_ERRORS = 20
FIRST_BYTES = {
    b"\x1f\x8b": "compressed by gzip",
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
}
SUFFIXES = {
    ".txt": "plain text",
    ".csv": "a table of text; write it as JSONL or Parquet",
    ".tsv": "a table of text; write it as JSONL or Parquet",
}
"""What some people try, and each line of which would be an error."""
PARQUET = b"PAR1"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILE_NAME = re.compile(r".*\.(jsonl?|parquet|csv|tsv|txt|ya?ml|arrow|gz|zip|zst|bz2|xz)", re.IGNORECASE)

Records = Iterable[tuple[str, Any]]
"""Where each record stands, and the record; or the `FormatError` that was met in its place."""


Made = TypeVar("Made")


@dataclass(frozen=True)
class Form(Generic[Made]):
    """What records are read for."""

    expected: str
    """What a record looks like, for messages."""
    plain_text: str
    """Why a file of plain text will not do."""
    make: Callable[[Any, str], list[Made]]
    """Of a record and where it stands; raises FormatError."""


TURNS = Form(EXPECTED, NO_PROMPT, turns_of)


def read_data(file: Path, root: Path, setting: str = "train.file", split: str | None = None) -> list[Turn]:
    """Every assistant turn of what `setting` names: a path that starts at `root`, or a Hub id if there is no such path.

    Args:
        split: of a data set on the Hub; None: `setting` can name files only.

    Raises:
        UserError: as `read_turns`, or the data set cannot be fetched.
    """
    return read_as(TURNS, file, root, setting, split)


def read_as(form: Form[Made], file: Path, root: Path, setting: str, split: str | None = None) -> list[Made]:
    """As `read_data`, for records of any form."""
    path = root / file
    if not is_hub_id(file, root):
        return _read_file(form, path, setting)
    if split is None:
        raise UserError(
            f"{setting}: {path} does not exist; expected a .jsonl or .parquet file (train.file and eval.file alone take "
            "a Hub id)"
        )
    from preft_cli.data.hub import hub_records

    return _make(form, hub_records(str(file), path, setting, split), f"{setting}: split {split} of {file} is empty")


def is_hub_id(file: Path, root: Path) -> bool:
    """Whether `file` reads like `owner/name`, and not like a file that is missing; what is there on this machine wins."""
    name = file.as_posix()
    return bool(_HUB_ID.fullmatch(name)) and not _FILE_NAME.fullmatch(name) and not (root / file).exists()


def read_turns(path: Path, setting: str = "train.file") -> list[Turn]:
    """Every assistant turn of the JSONL or Parquet file at `path`, in the file's order. Blank lines are skipped.

    Raises:
        UserError: the file is missing or empty, or lines of it are wrong: each with its number, what was found and what
            is expected, at most `MAX_ERRORS` of them. `setting` is the config key that names the file.
    """
    return _read_file(TURNS, path, setting)


def _read_file(form: Form[Made], path: Path, setting: str) -> list[Made]:
    start = _first_bytes(path, setting)
    if start.startswith(PARQUET) or path.suffix == ".parquet":
        from preft_cli.data.parquet import parquet_records

        empty = f"{setting}: {path} has no rows; expected one of {form.expected} in each"
        return _make(form, parquet_records(path, setting), empty)
    for magic, what in FIRST_BYTES.items():
        if start.startswith(magic):
            raise UserError(f"{setting}: {path} is {what}; unpack it first: expected JSONL or Parquet")
    if path.suffix in SUFFIXES and not start.startswith(b"{"):
        why = f": {form.plain_text}" if path.suffix == ".txt" else ""
        raise UserError(f"{setting}: {path} is {SUFFIXES[path.suffix]}{why}")
    empty = f"{setting}: {path} is empty; expected one JSON object on each line: {form.expected}"
    return _make(form, _lines(path, setting, form.expected), empty)


def raise_all(errors: list[str]) -> None:
    """Raise one UserError for all `errors` (the first `MAX_ERRORS` in full), or do nothing when there are none."""
    if errors:
        rest = [f"… and {len(errors) - MAX_ERRORS} more"] if len(errors) > MAX_ERRORS else []
        raise UserError("\n".join(errors[:MAX_ERRORS] + rest))


def _make(form: Form[Made], records: Records, empty: str) -> list[Made]:
    made: list[Made] = []
    errors: list[str] = []
    for where, record in records:
        try:
            if isinstance(record, FormatError):
                raise record
            made += form.make(record, where)
        except FormatError as error:
            errors.append(f"{where}: {error}")
    raise_all(errors)
    if not made:
        raise UserError(empty)
    return made


def _first_bytes(path: Path, setting: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(8)
    except FileNotFoundError:
        raise UserError(f"{setting}: {path} does not exist") from None
    except OSError as error:
        raise UserError(f"{setting}: {path} cannot be read: {error.strerror}") from error


def _lines(path: Path, setting: str, expected: str) -> Iterator[tuple[str, Any]]:
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{path}:{number}", _parse(line, number, expected)


def _parse(line: bytes, number: int, expected: str) -> Any:
    """The record of a line, or what is wrong with it."""
    if number == 1 and line.strip() in (b"[", b"{"):
        return FormatError(f"found a JSON document over several lines; expected one object on each line: {expected}")
    try:
        return parse_json(line.decode())
    except UnicodeDecodeError as error:
        return FormatError(f"not UTF-8 text (byte {error.start + 1})")
    except FormatError as error:
        return error
