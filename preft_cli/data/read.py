"""JSONL files to turns, with every error of a file at once."""

from __future__ import annotations

import json
from pathlib import Path

from preft_cli.data.formats import EXPECTED, FormatError, turns_of
from preft_cli.data.turn import Turn
from preft_cli.errors import UserError

MAX_ERRORS = 20


def read_turns(path: Path, setting: str = "train.file") -> list[Turn]:
    """Every assistant turn of the JSONL file at `path`, in the file's order. Blank lines are skipped.

    Raises:
        UserError: the file is missing or empty, or lines of it are wrong: each with its number, what was found and what
            is expected, at most `MAX_ERRORS` of them. `setting` is the config key that names the file.
    """
    turns: list[Turn] = []
    errors: list[str] = []
    for number, line in enumerate(_lines(path, setting), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            turns += turns_of(_parse(line, number), where)
        except FormatError as error:
            errors.append(f"{where}: {error}")
    raise_all(errors)
    if not turns:
        raise UserError(f"{setting}: {path} is empty; expected one JSON object on each line: {EXPECTED}")
    return turns


def raise_all(errors: list[str]) -> None:
    """Raise one UserError for all `errors` (the first `MAX_ERRORS` in full), or do nothing when there are none."""
    if errors:
        rest = [f"… and {len(errors) - MAX_ERRORS} more"] if len(errors) > MAX_ERRORS else []
        raise UserError("\n".join(errors[:MAX_ERRORS] + rest))


def _lines(path: Path, setting: str) -> list[bytes]:
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except FileNotFoundError:
        raise UserError(f"{setting}: {path} does not exist") from None
    except OSError as error:
        raise UserError(f"{setting}: {path} cannot be read: {error.strerror}") from error


def _parse(line: bytes, number: int) -> object:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise FormatError(f"not UTF-8 text (byte {error.start + 1})") from error
    except RecursionError as error:
        raise FormatError("nested too deeply") from error
    except ValueError as error:
        if number == 1 and line.strip() in (b"[", b"{"):
            raise FormatError(
                f"found a JSON document over several lines; expected one object on each line: {EXPECTED}"
            ) from error
        raise FormatError(f"not JSON: {error}") from error
