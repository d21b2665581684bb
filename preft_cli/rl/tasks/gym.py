"""The package reasoning-gym: imported when it is needed, without its noise."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import MISSING, Field, fields
from types import ModuleType, NoneType
from typing import Any, get_args

from preft_cli.config.messages import shown
from preft_cli.config.near import near_words
from preft_cli.errors import UserError

OURS = {"seed": "project.seed", "size": "train.grpo.train_problems and train.grpo.eval_problems"}
"""Settings of every environment that the config has elsewhere."""
NEEDS = {"zebra_puzzles": "pycosat"}
"""Environments that need a package which is not asked of everyone: a C extension that has no wheels."""
REFUSED = {"composite": "it mixes other environments; name one of them"}


def create(name: str, args: dict[str, Any], seed: int, size: int) -> Any:
    """The environment `name` with `size` problems drawn by `seed`.

    Raises:
        UserError: the package is missing, there is no such environment, or its settings are wrong.
    """
    with quiet():
        environments = _environments()
        check_name(name, environments)
        check_args(name, args, environments[name][1])
        try:
            _, config = environments[name]
            settings = config(**args, seed=seed, size=size)
            if hasattr(settings, "validate"):
                settings.validate()
            return environments[name][0](config=settings)
        except Exception as error:  # asserts for the most part
            reason = str(error) or type(error).__name__
            raise UserError(f"train.grpo.environment_args: {name} refuses them: {reason}", 2) from error


def check_name(name: str, environments: dict[str, Any]) -> None:
    """
    Raises:
        UserError: there is no such environment here.
    """
    if name in REFUSED:
        raise UserError(f"train.grpo.environment: {name}: {REFUSED[name]}", 2)
    if name not in environments:
        near = near_words(name, list(environments))
        hint = f"did you mean {near}?" if near else f"expected one of {', '.join(sorted(environments))}"
        raise UserError(f"train.grpo.environment: reasoning-gym has no {name!r}; {hint}", 2)
    package = NEEDS.get(name)
    if package and not has_package(package):
        raise UserError(
            f"train.grpo.environment: {name} needs the package {package}, which is built from C source: pip install {package}",
            2,
        )


def check_args(name: str, args: dict[str, Any], config: type) -> None:
    """
    Raises:
        UserError: the environment has no such setting, or it is of another kind.
    """
    settings = {field.name: field for field in fields(config)}
    known = [name for name in settings if name not in OURS]
    for key, value in args.items():
        where = f"train.grpo.environment_args.{key}"
        if key in OURS:
            raise UserError(f"{where}: set {OURS[key]} instead", 2)
        if key not in known:
            near = near_words(key, known)
            hint = f"did you mean {near}?" if near else f"expected one of {', '.join(known)}"
            raise UserError(f"{where}: {name} has no such setting; {hint}", 2)
        if expected := _other_kind(value, settings[key]):
            raise UserError(f"{where}: expected {expected}, found {shown(value)}", 2)


def _other_kind(value: Any, setting: Field[Any]) -> str | None:
    """What `setting` is, by its type and default, if `value` is not that. Few kinds: the others check themselves."""
    default = setting.default if setting.default_factory is MISSING else setting.default_factory()
    types = {setting.type, *get_args(setting.type)}
    if value is None and (default is None or NoneType in types):
        return None
    hint = "" if default is None or default is MISSING else f" (default: {default})"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else f"true or false{hint}"
    if isinstance(default, int | float) or (default is None and types & {int, float}):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole = int in types and not isinstance(default, float)
        if number and (not whole or float(value).is_integer()):
            return None
        return f"{'a whole number' if whole else 'a number'}{hint}"
    if isinstance(default, list | tuple):
        return None if isinstance(value, list | tuple) else f"a list{hint}"
    return None


def has_package(name: str) -> bool:
    """Whether `name` can be imported."""
    from importlib.util import find_spec

    return find_spec(name) is not None


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing that the package prints or warns of reaches the user."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _environments() -> dict[str, Any]:
    """Classes of the environment and of its config, by name."""
    if not has_package("reasoning_gym"):
        raise UserError("train.grpo.environment: reasoning-gym is not installed: pip install 'preft[rl]'")
    # It imports matplotlib's windows, which are not wanted and may be impossible here.
    os.environ.setdefault("MPLBACKEND", "agg")
    with _placeholder("pycosat"):
        from reasoning_gym.factory import DATASETS
    return dict(DATASETS)


@contextmanager
def _placeholder(name: str) -> Iterator[None]:
    """An empty module `name` while the body imports, if there is none.

    One environment of a hundred needs pycosat, and the package imports it for all. Where no compiler built it, the others
    are to work all the same; `check_name` refuses that one.
    """
    if name in sys.modules or has_package(name):
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]
