"""What is wrong with a config, as lines for people."""

from __future__ import annotations

from dataclasses import dataclass

from preft_cli.errors import UserError

LAST = (1 << 30,)
"""The order of problems on the command line: behind those of the file."""


@dataclass(frozen=True)
class Problem:
    """One line: `where: text`, with where such as `preft.yaml:12:5` or `--set adapter.rnak=3`."""

    where: str
    text: str
    order: tuple[int, ...] = ()
    """Sorts the lines as a reader of the file meets them: (line, column); command line options come last."""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class ConfigErrors(UserError):
    """Everything that is wrong with a config, at once. Exit code 2."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = sorted(problems, key=lambda problem: problem.order)
        super().__init__("\n".join(str(problem) for problem in self.problems), exit_code=2)
