"""The package reasoning-gym: imported when it is needed, without its noise."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from types import ModuleType
from typing import Any

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
        UserError: the environment has no such setting.
    """
    known = [field.name for field in fields(config) if field.name not in OURS]
    for key in args:
        where = f"train.grpo.environment_args.{key}"
        if key in OURS:
            raise UserError(f"{where}: set {OURS[key]} instead", 2)
        if key not in known:
            near = near_words(key, known)
            hint = f"did you mean {near}?" if near else f"expected one of {', '.join(known)}"
            raise UserError(f"{where}: {name} has no such setting; {hint}", 2)


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
