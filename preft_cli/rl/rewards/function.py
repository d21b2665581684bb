"""The reward `package.module:function`: a Python function of the user's."""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any

from preft_cli.config.near import near_words
from preft_cli.errors import UserError
from preft_cli.rl.problem import Problem

GIVEN = ("prompts", "completions", "answers", "records")
"""Keywords of the call: prompts as the API takes them, answers as text, what is right (or None), data rows."""


class FunctionReward:
    """Calls the function once for all answers of a step."""

    def __init__(self, name: str, args: dict[str, Any], root: Path) -> None:
        """
        Raises:
            UserError: it cannot be imported, or takes other arguments.
        """
        self.name = name
        self._function = load_function(name, root)
        self._args = args
        self._passed = _passed(name, self._function, args)

    def __call__(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float | None]:
        """See `Reward`.

        Raises:
            UserError: the function fails, or returns anything but a list of one number or None for each answer.
        """
        given: dict[str, list[Any]] = {
            "prompts": [_plain(problem) for problem in problems],
            "completions": list(completions),
            "answers": [problem.answer for problem in problems],
            "records": [dict(problem.record) for problem in problems],
        }
        try:
            returned = self._function(**{key: given[key] for key in self._passed}, **self._args)
        except (Exception, SystemExit) as error:  # sys.exit(0) would end the training as if all were well
            raise UserError(
                f"the reward {self.name} failed on answers to {_rows(problems)}: {describe(error)}"
            ) from error
        if not isinstance(returned, list | tuple):
            raise UserError(
                f"the reward {self.name} returned {_shown(returned)}; expected a list with a number or None for each answer"
            )
        if len(returned) != len(problems):
            raise UserError(
                f"the reward {self.name} returned {len(returned)} numbers for {len(problems)} answers (to {_rows(problems)})"
            )
        for problem, value in zip(problems, returned, strict=True):
            if value is not None and not isinstance(value, Real):
                raise UserError(
                    f"the reward {self.name} returned {_shown(value)} for an answer to {problem.where}; expected a number or None"
                )
        return [None if value is None else _float(value) for value in returned]


def load_function(name: str, root: Path) -> Callable[..., Any]:
    """The function `package.module:function`, importable from `root` or from what Python knows.

    Raises:
        UserError: there is none.
    """
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise UserError("no name of a function; expected package.module:function", 2)
    try:
        with _importable(root):
            module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UserError(f"there is no module {error.name}: looked in {root} and where Python looks", 2) from error
        raise UserError(f"importing {module_name} failed: {describe(error)}", 2) from error
    except (Exception, SystemExit) as error:
        raise UserError(f"importing {module_name} failed: {describe(error)}", 2) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = near_words(function_name, [key for key, value in vars(module).items() if callable(value)])
        found = f"{module.__file__} has no function {function_name}"
        raise UserError(found + (f"; did you mean {near}?" if near else ""), 2)
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{function_name} is an async function; expected a plain one", 2)
    return function  # type: ignore[no-any-return]


def describe(error: BaseException) -> str:
    """`ValueError: text (rewards.py:12)`: the place is where the user's code was last."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{place}"


def _passed(name: str, function: Callable[..., Any], args: dict[str, Any]) -> list[str]:
    """Those of `GIVEN` that the function takes."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of some built-in ones
        return list(GIVEN)
    kinds = inspect.Parameter
    takes_all = any(one.kind is kinds.VAR_KEYWORD for one in parameters.values())
    by_keyword = {
        key for key, one in parameters.items() if one.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    needed = [
        key
        for key, one in parameters.items()
        if one.default is kinds.empty and one.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    ]
    given = f"it is called with the keywords {', '.join(GIVEN)} and its args of the config"
    if strange := [key for key in needed if key not in (*GIVEN, *args) or key not in by_keyword]:
        raise UserError(f"{name} needs the argument {strange[0]}; {given}", 2)
    if unknown := [key for key in args if key in GIVEN or not (takes_all or key in by_keyword)]:
        raise UserError(f"args.{unknown[0]}: {name} takes no such argument; {given}", 2)
    return [key for key in GIVEN if takes_all or key in by_keyword]


@contextmanager
def _importable(root: Path) -> Iterator[None]:
    """`root` goes first while the module is imported, and last from then on, for what it imports later."""
    folder = str(root.resolve())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def _plain(problem: Problem) -> str | list[dict[str, str]]:
    if isinstance(problem.prompt, str):
        return problem.prompt
    return [{"role": message.role, "content": message.text} for message in problem.prompt]


def _float(value: Any) -> float:
    """Whole numbers beyond all floats are infinite, which `score` refuses with the row's name."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _rows(problems: Sequence[Problem]) -> str:
    rows = list(dict.fromkeys(problem.where for problem in problems))
    return ", ".join(rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
