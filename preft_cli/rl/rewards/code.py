"""The reward `code`: whether the program in the answer passes the row's tests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from pydantic import Field

from preft_cli.config.section import PositiveInt, Section
from preft_cli.convert.workers import cores
from preft_cli.rl.problem import Problem
from preft_cli.rl.rewards.programs import code_tests, setup_of, whole_program
from preft_cli.rl.rewards.sandbox import Limits, Program, run_tests
from preft_cli.rl.text import python_code


class CodeArgs(Section):
    """Its settings."""

    timeout_s: float = Field(
        5.0, gt=0, le=3600, description="Seconds of computing of one answer, for all of its tests."
    )
    memory_mb: Annotated[PositiveInt, Field(ge=64)] = Field(1024, description="Memory of one answer.")
    partial: bool = Field(False, description="The share of tests that pass, instead of 1 for all of them and 0.")


class CodeReward:
    """1 if all tests pass, else 0; or the share that passes."""

    name = "code"

    def __init__(self, args: CodeArgs) -> None:
        self._partial = args.partial
        self._limits = Limits(args.timeout_s, args.memory_mb << 20, stop_at_failure=not args.partial)

    def __call__(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float | None]:
        """See `Reward`; None where the problem has no tests. Programs run side by side, one a core."""
        with ThreadPoolExecutor(cores()) as pool:
            return list(pool.map(self._score, problems, completions))

    def _score(self, problem: Problem, completion: str) -> float | None:
        tests = code_tests(problem.record)
        if not tests:
            return None
        code = whole_program(problem.record, python_code(completion))
        passed = run_tests(Program(code, setup_of(problem.record), tests), self._limits)
        return passed / len(tests) if self._partial else float(passed == len(tests))
