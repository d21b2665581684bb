"""`preft bench --sweep num_adapters=1,8,64,512`: the same benchmark for several values of a key, or of some that move together.

Each value is a benchmark of its own with a result of its own; the sweep's file sums them up and is written anew after each.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from preft_cli.bench.results import BenchResult, write_json
from preft_cli.bench.sweep_result import SweepPoint, SweepResult
from preft_cli.config.load import changed
from preft_cli.config.overrides import Override
from preft_cli.config.problems import ConfigErrors, Problem
from preft_cli.config.schema import BenchConfig, PreftConfig, Section
from preft_cli.config.swept import Value, parse_values, split_sweep
from preft_cli.console import say, warn
from preft_cli.errors import UserError


@dataclass(frozen=True)
class Sweep:
    """The key, and a checked config for each of its values."""

    key: str
    configs: dict[Value, PreftConfig]


def swept_keys() -> list[str]:
    """Keys of the section `bench` that hold a single value. Not `prompts`: a path makes no file name."""
    defaults = {key: field.get_default(call_default_factory=True) for key, field in BenchConfig.model_fields.items()}
    return [key for key, default in defaults.items() if not isinstance(default, list | Section) and key != "prompts"]


def parse_sweep(text: str, config: PreftConfig) -> Sweep:
    """The sweep behind `--sweep KEY=VALUE,VALUE`, or `KEY:KEY=VALUE:VALUE,...` for keys that move together.

    Each value is checked as the config's own are.

    Raises:
        UserError: with everything that is wrong. Exit code 2.
    """
    named, values = split_sweep(text, "num_adapters=1,8,64")
    keys = [key.removeprefix("bench.") for key in named]
    origin = f"--sweep {text}"
    for key in keys:
        if key in BenchConfig.model_fields and key not in swept_keys():
            raise ConfigErrors([Problem(origin, f"bench.{key} cannot be swept; these can: {', '.join(swept_keys())}")])
    points = parse_values(values, len(keys), origin)
    # A single value goes by what it is, so that 8 and `0x8` are one; several go by their text.
    by_value = {found[0] if len(keys) == 1 else name: found for name, found in points.items()}
    if len(by_value) < len(points):
        raise ConfigErrors([Problem(origin, "a value is named twice")])
    return Sweep(":".join(keys), _checked(keys, by_value, origin, config))


def _checked(
    keys: list[str], points: dict[Value, list[Value]], origin: str, config: PreftConfig
) -> dict[Value, PreftConfig]:
    configs: dict[Value, PreftConfig] = {}
    problems: list[Problem] = []
    for name, values in points.items():
        changes = [Override(("bench", key), value, origin) for key, value in zip(keys, values, strict=True)]
        try:
            configs[name] = changed(config, changes)
        except ConfigErrors as bad:
            problems += bad.problems
    if problems:
        raise ConfigErrors(list(dict.fromkeys(problems)))
    return configs


def run_sweep(
    sweep: Sweep, root: Path, out: Path | None = None, *, resume: bool = False, preset: str | None = None
) -> SweepResult:
    """Run the benchmark of each value; one that fails is recorded, and the others go on.

    Args:
        sweep: from `parse_sweep`.
        root: folder of the config file.
        out: the summary's file; the results lie in a folder of its name without the suffix. Default: by the time, under
            `runs/bench` in `root`.
        resume: keep the results that are there, if they are of the same config and without failures.
        preset: the preset's name, for the results.
    """
    from preft_cli.bench.prepare import finished, prepare, result_path
    from preft_cli.bench.run import bench

    if resume and out is None:
        raise UserError("--sweep with --resume needs --out FILE.json: the sweep that is to go on", 2)
    path = result_path(root, out, datetime.now(UTC))
    folder = path.with_suffix("")
    files = {value: folder / f"{sweep.key}={value}.json".replace(":", "+") for value in sweep.configs}
    for file in files.values():
        result_path(root, file, datetime.now(UTC))
        if not resume:  # or a later --resume would mix results of two sweeps
            file.unlink(missing_ok=True)
    for config in sweep.configs.values():  # what cannot work is told before anything is measured
        prepare(config, root)
    swept = SweepResult(key=sweep.key, values=list(files), points=[], path=path)
    for number, (value, config) in enumerate(sweep.configs.items(), start=1):
        file = files[value]
        say(f"sweep {number}/{len(sweep.configs)}: {sweep.key}={value}")
        error = None
        result = None
        try:
            result = (finished(file, config) if resume else None) or bench(
                config, root, file, resume=resume, preset=preset
            )
        except UserError as failed:
            warn(f"{sweep.key}={value}: {failed}")
            error = str(failed)
        point = _point(value, f"{folder.name}/{file.name}", result, error)
        swept = swept.model_copy(update={"points": [*swept.points, point]})
        write_json(swept, path)
    return swept


def _point(value: Value, file: str, result: BenchResult | None, error: str | None) -> SweepPoint:
    arms: dict[str, Any] = dict(result.arms) if result else {}
    return SweepPoint(
        value=value,
        file=file,
        requests_per_second={name: arm.requests_per_second for name, arm in arms.items()},
        ratios=result.ratios if result else {},
        failures=result.failures if result else 0,
        error=error,
    )
