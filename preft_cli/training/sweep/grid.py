"""The grid behind `preft train --sweep KEY=VALUE,VALUE --sweep ... --choose KEY`: a checked config for each cell."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from preft_cli.config.load import changed
from preft_cli.config.overrides import Override
from preft_cli.config.problems import ConfigErrors, Problem
from preft_cli.config.schema import PreftConfig
from preft_cli.config.swept import parse_values, split_sweep
from preft_cli.training.measure import ACCURACY, LOSS, Measure
from preft_cli.training.output import HARMLESS
from preft_cli.training.sweep.names import cell_name, short_names

EXAMPLE = "adapter.rank=8,16,32"
SEED, RANK, METHOD = "project.seed", "adapter.rank", "adapter.method"
SECTIONS = ("adapter", "train")
MAX_CELLS = 10_000

_OTHER_PROBLEMS = "accuracies on different problems do not compare"
_REFUSED = {
    "adapter.name": "all cells train the adapter of this name, and their folders have names of their own",
    "train.output_dir": "the cells' folders lie in it, named by their values",
    "train.validation_file": "losses on different rows do not compare",
    "train.max_length": "longer held-out rows are dropped, and losses on different rows do not compare",
    **{f"train.{key}": "it does not change what is trained" for key in HARMLESS - {"output_dir", "save_every"}},
    "train.task": "a loss and an accuracy do not compare",
    **{
        f"train.grpo.{key}": _OTHER_PROBLEMS
        for key in ("environment", "environment_args", "eval_problems", "worked_examples")
    },
    "train.grpo.rewards": "they decide what counts as solved, and accuracies by different rewards do not compare",
    **{
        f"train.grpo.{key}": "it does not change what is trained"
        for key in ("rollout_url", "rollout_store", "in_flight")
    },
    "train.save_every": "checkpoints do not change what is trained; how often runs are evaluated is train.eval_every",
}


@dataclass(frozen=True)
class Axis:
    """One `--sweep`: a key, or several that move together."""

    keys: tuple[str, ...]
    points: tuple[tuple[Any, ...], ...]
    """A value for each key."""
    origin: str

    @property
    def name(self) -> str:
        """As it was written: `adapter.rank`, or `adapter.rank:adapter.alpha`."""
        return ":".join(self.keys)


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    name: str
    """Of its folder."""
    settings: dict[str, Any]
    """The swept keys' values, as JSON has them."""
    config: PreftConfig


@dataclass(frozen=True)
class Grid:
    """All cells, in the order of the options: the last one moves fastest."""

    axes: tuple[Axis, ...]
    choose: tuple[str, ...]
    """Swept keys whose value is chosen by the validation loss."""
    cells: tuple[Cell, ...]
    config: PreftConfig
    """What the cells have in common."""

    @property
    def measure(self) -> Measure:
        """What tells the runs apart."""
        return ACCURACY if self.config.train.task == "grpo" else LOSS

    @property
    def swept(self) -> dict[str, list[Any]]:
        """The values of each swept key, as JSON has them."""
        keys = [key for axis in self.axes for key in axis.keys]
        # By their JSON, since lists cannot be keys, and True == 1.
        found = {key: {json.dumps(cell.settings[key]): cell.settings[key] for cell in self.cells} for key in keys}
        return {key: list(values.values()) for key, values in found.items()}


def parse_grid(sweeps: Sequence[str], choose: Sequence[str], config: PreftConfig) -> Grid:
    """The grid, with every value of it checked as the config's own are.

    Raises:
        ConfigErrors: with everything that is wrong. Exit code 2.
    """
    problems: list[Problem] = []
    axes: list[Axis] = []
    for text in sweeps:
        try:
            axes.append(_axis(text))
        except ConfigErrors as bad:
            problems += bad.problems
    keys = [key for axis in axes for key in axis.keys]
    twice = {key for key in keys if keys.count(key) > 1}
    problems += [Problem("--sweep", f"{key} is swept twice") for key in sorted(twice)]
    size = math.prod(len(axis.points) for axis in axes)
    if size > MAX_CELLS:
        problems.append(Problem("--sweep", f"{size} runs are too many; at most {MAX_CELLS} make a sweep"))
    if not problems:
        problems += _chosen_problems(axes, choose, config)
    problems += _held_out_problems(config)
    if problems:
        raise ConfigErrors(problems)
    return Grid(tuple(axes), tuple(choose), _cells(axes, config), config)


def _held_out_problems(config: PreftConfig) -> list[Problem]:
    """Nothing to compare the runs by."""
    if config.eval.file or (config.train.task == "grpo" and config.train.grpo.environment):
        return []
    if config.train.task == "grpo":
        text = (
            "neither train.grpo.environment nor eval.file is set: a sweep compares the accuracies on held-out problems"
        )
    else:
        text = "eval.file is not set: a sweep compares the losses on held-out conversations"
    return [Problem("--sweep", text)]


def _axis(text: str) -> Axis:
    keys, values = split_sweep(text, EXAMPLE)
    origin = f"--sweep {text}"
    for key in keys:
        _check_key(key, origin)
    points = parse_values(values, len(keys), origin, lists=True)
    return Axis(tuple(keys), tuple(tuple(point) for point in points.values()), origin)


def _check_key(key: str, origin: str) -> None:
    section, _, name = key.partition(".")
    if not name or "." in name.removeprefix("grpo." if section == "train" else ""):
        raise ConfigErrors([Problem(origin, f"{key}: expected section.key=value,value, such as {EXAMPLE}")])
    reason = _REFUSED.get(key)
    if key != SEED and section in PreftConfig.model_fields and section not in SECTIONS:
        reason = "a sweep is of keys of adapter and train, and of project.seed"
    if reason:
        raise ConfigErrors([Problem(origin, f"{key} cannot be swept: {reason}")])


def _chosen_problems(axes: Sequence[Axis], choose: Sequence[str], config: PreftConfig) -> list[Problem]:
    problems = []
    whole = [axis.name for axis in axes]
    for key in choose:
        origin = f"--choose {key}"
        if choose.count(key) > 1:
            problems.append(Problem(origin, "is given twice"))
        elif key == SEED:
            problems.append(Problem(origin, "a seed is not chosen: losses are means over seeds"))
        elif key not in whole:
            moving = next((axis.name for axis in axes if key in axis.keys), None)
            advice = f"it moves with others: choose {moving}" if moving else f"swept are: {', '.join(whole)}"
            problems.append(
                Problem(origin, f"is not swept by itself; {advice}" if moving else f"is not swept; {advice}")
            )
        elif SEED in key.split(":"):
            problems.append(Problem(origin, "a seed is not chosen: losses are means over seeds"))
    if choose and config.train.task == "grpo":
        problems.append(
            Problem(
                f"--choose {choose[0]}",
                "train.task grpo measures held-out problems only, and what is chosen by the accuracy on these looks better "
                "than it is: sweep without --choose, and compare all values in the table",
            )
        )
    elif choose and not config.train.validation_file:
        problems.append(
            Problem(
                f"--choose {choose[0]}",
                "train.validation_file is not set. What is chosen by the held-out loss itself looks better than it is: "
                "give conversations that are neither in train.file nor in eval.file",
            )
        )
    return list(dict.fromkeys(problems))


def _cells(axes: Sequence[Axis], config: PreftConfig) -> tuple[Cell, ...]:
    problems: list[Problem] = []
    cells: dict[str, Cell] = {}
    short = short_names([key for axis in axes for key in axis.keys])
    for point in itertools.product(*(axis.points for axis in axes)):
        changes = [
            Override(tuple(key.split(".")), value, axis.origin)
            for axis, values in zip(axes, point, strict=True)
            for key, value in zip(axis.keys, values, strict=True)
        ]
        try:
            cell = _cell(changes, short, config)
        except ConfigErrors as bad:
            problems += bad.problems
            continue
        if cell.name in cells:
            problems.append(_same_name(cell, cells[cell.name], axes))
        cells[cell.name] = cell
    if problems:
        raise ConfigErrors(list(dict.fromkeys(problems)))
    return tuple(cells.values())


def _cell(changes: Sequence[Override], short: dict[str, str], config: PreftConfig) -> Cell:
    checked = changed(config, changes)
    dumped = checked.model_dump(mode="json")
    settings = {".".join(change.path): _at(dumped, change.path) for change in changes}
    name = cell_name({short[key]: value for key, value in settings.items()})
    train = checked.train.model_copy(update={"output_dir": config.output_dir / name})
    return Cell(name, settings, checked.model_copy(update={"train": train}))


def _at(data: Any, path: Sequence[str]) -> Any:
    for name in path:
        data = data[name]
    return data


def _same_name(cell: Cell, other: Cell, axes: Sequence[Axis]) -> Problem:
    if json.dumps(cell.settings) == json.dumps(other.settings):
        text = f"a value is named twice: {cell.name}"
    else:
        text = f"two runs would have the folder {cell.name}; write their values in other words"
    return Problem(" ".join(axis.origin for axis in axes), text)
