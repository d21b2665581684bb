"""Reads `preft.yaml`, lays the command line's values over it, and reports everything that is wrong at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from preft_cli.config.document import Document
from preft_cli.config.invalid import Origin, problems_of
from preft_cli.config.overrides import Override, apply, parse_set
from preft_cli.config.problems import LAST, ConfigErrors, Problem
from preft_cli.config.reader import read_file
from preft_cli.config.schema import PreftConfig


@dataclass(frozen=True)
class Loaded:
    """A config, where it came from, and the folder that its relative paths start from."""

    config: PreftConfig
    path: Path | None
    root: Path


def load(path: Path, overrides: Sequence[str | Override] = ()) -> Loaded:
    """Read the config at `path`. A text in `overrides` is `section.key=value`, as behind `--set`.

    Raises ConfigErrors (exit code 2) with all problems of the file and of the overrides.
    """
    parsed, problems = _parse(overrides)
    try:
        document = read_file(path)
    except ConfigErrors as unreadable:
        raise ConfigErrors(unreadable.problems + problems) from None
    for name, (line, column), (first, _) in document.duplicates:
        text = f"{name} is set twice (first on line {first})"
        problems.append(Problem(f"{path}:{line}:{column}", text, (line, column)))
    return Loaded(_validated(document, str(path), parsed, problems), path, path.absolute().parent)


def load_defaults(root: Path, overrides: Sequence[str | Override] = ()) -> Loaded:
    """The config of a folder without a file: defaults, with the overrides laid over them."""
    parsed, problems = _parse(overrides)
    return Loaded(_validated(None, "defaults", parsed, problems), None, root.absolute())


def changed(config: PreftConfig, overrides: Sequence[Override]) -> PreftConfig:
    """A loaded config with further values laid over it, checked like all others. ConfigErrors names their origin."""
    return _validated(None, "config", list(overrides), [], config.model_dump(exclude_unset=True))


def _parse(overrides: Sequence[str | Override]) -> tuple[list[Override], list[Problem]]:
    parsed, problems = [], []
    for override in overrides:
        try:
            parsed.append(parse_set(override) if isinstance(override, str) else override)
        except ConfigErrors as bad:
            problems += [Problem(problem.where, problem.text, LAST) for problem in bad.problems]
    return parsed, problems


def _validated(
    document: Document | None,
    name: str,
    overrides: list[Override],
    problems: list[Problem],
    below: dict[str, Any] | None = None,
) -> PreftConfig:
    """The config of the document (or of the data `below`, where there is none) with the overrides laid over it."""
    data, unset = apply(document.data if document else below or {}, overrides)
    problems = problems + [Problem(problem.where, problem.text, LAST) for problem in unset]
    try:
        config = PreftConfig.model_validate(data)
    except ValidationError as invalid:
        found = problems_of(invalid.errors(include_url=False), data, Origin(document, name, overrides))
        raise ConfigErrors(problems + found) from None
    if problems:
        raise ConfigErrors(problems)
    return config
