"""Values from the command line that win over the file: `--set section.key=value` and flags such as `--store DIR`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from preft_cli.config.problems import ConfigErrors, Problem
from preft_cli.config.reader import parse


@dataclass(frozen=True)
class Override:
    """One value for one key path. `origin` names it in errors, as the person wrote it: `--set adapter.rank=8`."""

    path: tuple[str, ...]
    value: Any
    origin: str


def parse_set(text: str) -> Override:
    """Parse the text after `--set`; its value is YAML as in the file. ConfigErrors if it is not `section.key=value`."""
    origin = f"--set {text}"
    name, equals, value = text.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise ConfigErrors([Problem(origin, "expected section.key=value, such as adapter.rank=8")])
    document = parse(value, origin)
    if document is not None and document.duplicates:
        raise ConfigErrors([Problem(origin, f"{document.duplicates[0][0]} is set twice")])
    return Override(path, None if document is None else document.data, origin)


def apply(data: dict[str, Any], overrides: list[Override]) -> tuple[dict[str, Any], list[Problem]]:
    """A copy of the file's data with the overrides in it, later ones winning, and what could not be applied."""
    problems = []
    for override in overrides:
        try:
            data = _with(data, override.path, override.value)
        except _NotASection as section:
            problems.append(Problem(override.origin, f"{section} holds a single value, so nothing can be set below it"))
    return data, problems


class _NotASection(Exception):
    """The dotted path of a value that is no mapping."""


def _with(data: dict[str, Any], path: tuple[str, ...], value: Any, above: str = "") -> dict[str, Any]:
    name, *rest = path
    if not rest:
        return {**data, name: value}
    inner = data.get(name)
    inner = {} if inner is None else inner
    if not isinstance(inner, dict):
        raise _NotASection(f"{above}{name}")
    return {**data, name: _with(inner, tuple(rest), value, f"{above}{name}.")}
