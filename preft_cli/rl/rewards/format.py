"""The reward `format`: whether the whole answer has the form of a regular expression."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field, field_validator

from preft_cli.config.section import Section
from preft_cli.rl.problem import Problem


class FormatArgs(Section):
    """Its settings."""

    pattern: str = Field(description="A Python regular expression for all of the answer; . stands for line ends too.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return pattern


class FormatReward:
    """1 or 0."""

    name = "format"

    def __init__(self, args: FormatArgs) -> None:
        self._pattern = re.compile(args.pattern, re.DOTALL)

    def __call__(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float | None]:
        """See `Reward`. Space around the answer does not count."""
        return [float(bool(self._pattern.fullmatch(completion.strip()))) for completion in completions]
