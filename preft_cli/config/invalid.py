"""From pydantic's validation errors to problems with a place: a line of the file, or an option of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from preft_cli.config.document import Document, KeyPath, Position
from preft_cli.config.messages import explain, shown
from preft_cli.config.overrides import Override
from preft_cli.config.problems import LAST, Problem
from preft_cli.config.schema import PreftConfig


def problems_of(errors: list[ErrorDetails], data: dict[str, Any], origin: Origin) -> list[Problem]:
    """One problem a value: the branches of a union (`all-linear`, or a list) are told as one."""
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for error in errors:
        by_path.setdefault(_path_in(data, error), []).append(error)
    # A list whose second entry is wrong fails every branch of the union; the entry is what the person needs to know.
    deepest = [path for path in by_path if not any(other[: len(path)] == path != other for other in by_path)]
    return [problem for path in deepest for problem in origin.problems(path, by_path[path])]


def _path_in(data: Any, error: ErrorDetails) -> KeyPath:
    """The error's path without the names of union branches that pydantic puts into it."""
    path: list[str | int] = []
    for part in error["loc"]:
        if (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            data = data[part]  # type: ignore[index, unused-ignore]
            path.append(part)
        elif error["type"] == "missing" and part == error["loc"][-1]:
            path.append(part)
    return tuple(path)


@dataclass(frozen=True)
class Origin:
    """Finds out who set a value: the file or an override. `name` is the file's, as it is shown."""

    document: Document | None
    name: str
    overrides: list[Override]

    def problems(self, path: KeyPath, errors: list[ErrorDetails]) -> list[Problem]:
        """Usually one; an unknown key that stands in the file and on the command line is wrong in both places."""
        unknown = errors[0]["type"] == "extra_forbidden"
        text = f"{'.'.join(str(part) for part in path)}: {_one_text(path, errors)}".removeprefix(": ")
        override = self._override(path)
        found = [Problem(override.origin, text, LAST)] if override else []
        if override is None or (unknown and self._position(path, of_key=True)):
            found.append(self._in_file(path, text, of_key=unknown))
        return found

    def _in_file(self, path: KeyPath, text: str, *, of_key: bool) -> Problem:
        """At the value, or at the nearest thing around it that the file holds."""
        around = (self._position(path[:size], of_key=of_key) for size in range(len(path), -1, -1))
        line, column = next((position for position in around if position), (1, 1))
        return Problem(f"{self.name}:{line}:{column}", text, (line, column))

    def _override(self, path: KeyPath) -> Override | None:
        """The last override that set this value; else, if the file lacks it, the last that set something below it."""
        over = [override for override in self.overrides if override.path == path[: len(override.path)]]
        below = [override for override in self.overrides if path == override.path[: len(path)]]
        if not over and not self._position(path):
            over = below
        return over[-1] if over else None

    def _position(self, path: KeyPath, *, of_key: bool = False) -> Position | None:
        return self.document.position(path, of_key=of_key) if self.document else None


def _one_text(path: KeyPath, errors: list[ErrorDetails]) -> str:
    texts = list(dict.fromkeys(explain(PreftConfig, path, error) for error in errors))
    found = f", found {shown(errors[-1]['input'])}"
    return ", or ".join([*(text.removesuffix(found) for text in texts[:-1]), texts[-1]])
