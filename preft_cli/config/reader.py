"""From a YAML file or a piece of YAML to a `Document`, with one clear line for whatever goes wrong."""

from __future__ import annotations

from pathlib import Path

import yaml

from preft_cli.config.document import BadNode, Composer, Document, Position
from preft_cli.config.problems import ConfigErrors, Problem

_IN_OTHER_WORDS = {
    "found character '\\t'": "a tab; YAML is indented with spaces only",
    "mapping values are not allowed here": "a ':' that is out of place: check the indentation, or quote the text",
    "expected <block end>": "the indentation does not fit the lines above",
    "could not find expected ':'": "expected `key: value`",
    "but got '<stream end>'": "the file ends inside a [ or { that was never closed",
    "quoted scalar found unexpected end of stream": "the file ends inside a quote that was never closed",
    "undefined alias": "an alias (*name) without its anchor (&name) above it",
    "but found another document": "a second document (---); a config is one document",
}
"""What PyYAML says, and what the person at the keyboard can do about it."""


def read_file(path: Path) -> Document:
    """Read a config file. ConfigErrors (one problem) if it cannot be read or is not a YAML mapping."""
    text = _text(path)
    document = parse(text, str(path))
    if document is None or document.data is None:
        raise _error(f"{path}:1:1", "the file has no settings; `preft init` writes a commented one")
    if not isinstance(document.data, dict):
        found = "a list" if isinstance(document.data, list) else "a single value"
        line, column = document.position(()) or (1, 1)
        raise _error(
            f"{path}:{line}:{column}", f"expected sections such as `adapter:` at the top of the file, found {found}"
        )
    return document


def parse(text: str, where: str) -> Document | None:
    """Parse YAML text; `where` names it in errors. None for a text without a value."""
    try:
        node = Composer(text).get_single_node()
        return None if node is None else Document(node)
    except BadNode as problem:
        raise _error(_at(where, problem.position), str(problem)) from None
    except yaml.reader.ReaderError as problem:
        at = _at(where, _position(text, problem.position))
        raise _error(at, f"a character that YAML does not allow ({chr(problem.character)!r})") from None
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        position = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise _error(_at(where, position), _words(problem)) from None
    except RecursionError:
        raise _error(_at(where, (1, 1)), "the values are nested too deeply") from None


def _text(path: Path) -> str:
    where = str(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _error(where, "no such file; `preft init` writes one, --config names another") from None
    except IsADirectoryError:
        raise _error(where, f"a folder, not a file; did you mean {path / 'preft.yaml'}?") from None
    except OSError as problem:
        raise _error(where, f"cannot be read: {problem.strerror or problem}") from None
    except ValueError as problem:  # a NUL character in the name
        raise _error(repr(where), f"not a file name: {problem}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        column = problem.start - (data.rfind(b"\n", 0, problem.start) + 1) + 1
        raise _error(f"{path}:{line}:{column}", "not UTF-8 text; save the file as UTF-8") from None


def _words(problem: yaml.MarkedYAMLError) -> str:
    said = f"{problem.context or ''} {problem.problem or ''}".strip()
    return next((words for theirs, words in _IN_OTHER_WORDS.items() if theirs in said), f"not valid YAML: {said}")


def _at(where: str, position: Position) -> str:
    """A position inside a file is worth telling; inside `--set key=value` it is not."""
    return where if where.startswith("-") else f"{where}:{position[0]}:{position[1]}"


def _position(text: str, index: int) -> Position:
    return text.count("\n", 0, index) + 1, index - (text.rfind("\n", 0, index) + 1) + 1


def _error(where: str, text: str) -> ConfigErrors:
    return ConfigErrors([Problem(where, text)])
