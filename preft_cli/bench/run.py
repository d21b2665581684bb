"""`preft bench`: let the arms take turns on the same requests, compare them, write the result."""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from preft_cli.bench import machine
from preft_cli.bench.adapters import Form, Made, make_adapters
from preft_cli.bench.arms import ARMS
from preft_cli.bench.assemble import arm_results, measured_notes, second_times
from preft_cli.bench.comparable import check_adapters
from preft_cli.bench.device import Device
from preft_cli.bench.engine import EngineSpec
from preft_cli.bench.fit import FittedPlan, fit
from preft_cli.bench.measure import Engines, measure_blocks
from preft_cli.bench.parts import Parts
from preft_cli.bench.plan import BenchPlan
from preft_cli.bench.prepare import Ready, finished, prepare, result_path
from preft_cli.bench.process import EngineProcess
from preft_cli.bench.ratios import ratios
from preft_cli.bench.results import AdapterSet, ArmResult, BenchResult, BlockRun, write_json
from preft_cli.bench.workload import Workload
from preft_cli.config.schema import PreftConfig
from preft_cli.console import progress, say
from preft_cli.convert.workers import cores
from preft_cli.errors import UserError
from preft_cli.models import BaseModel

CORES_TO_START: dict[Device, int] = {"cpu": 1, "gpu": 3}
"""Cores of an engine that starts: on a CPU that is importing, mostly, on a GPU compiling."""


def bench(
    config: PreftConfig, root: Path, out: Path | None = None, *, resume: bool = False, preset: str | None = None
) -> BenchResult:
    """Measure the arms of `config.bench` and write the result.

    Args:
        config: the project's config.
        root: folder of the config file.
        out: the result's file; default `runs/bench/<time>.json` under `root`. Logs lie beside it.
        resume: take what an interrupted run of the same plan has measured already.
        preset: name of the preset that the config comes from; recorded.

    Returns:
        The result; `failures` counts requests that did not get the tokens they asked for.

    Raises:
        UserError: bad settings, an engine that failed, or arms that do not compare.
    """
    if resume and out is None:
        raise UserError("--resume needs --out: the file of the run to go on with", exit_code=2)
    created, began = datetime.now(UTC), time.monotonic()
    out = result_path(root, out, created)
    if resume and (done := finished(out, config)):
        say(f"nothing left to do: {out} is of the same config, and nothing in it failed")
        return done
    ready = prepare(config, root)
    plan, base, workload = ready.plan, ready.base, ready.workload
    parts = Parts(out, plan, workload, resume=resume)
    fitted = parts.fitted = parts.fitted or fit(plan, base, workload)
    with tempfile.TemporaryDirectory(prefix="preft-bench-") as scratch:
        made = all_adapters(fitted, base, Path(scratch))
        adapters = {arm: made[form].described if (form := Form.of(arm)) else None for arm in arms_of(fitted)}
        check_adapters(adapters)
        check_host_memory(fitted, adapters)
        blocks = run_blocks(fitted, workload, made, Path(scratch), parts, out)
    notes = [*fitted.notes, *prompt_notes(ready)]
    result = summed_up(config, plan, arm_results(fitted.plan, blocks, adapters), blocks, notes).model_copy(
        update={"created": created, "seconds": time.monotonic() - began, "preset": preset, "path": out}
    )
    write_json(result, out)
    parts.remove()
    return result


def summed_up(
    config: PreftConfig, plan: BenchPlan, arms: dict[str, ArmResult], blocks: list[BlockRun], notes: list[str]
) -> BenchResult:
    """The result of these arms, measured in these blocks, on this machine."""
    second = second_times(arms)
    return BenchResult(
        created=datetime.now(UTC),
        seconds=0.0,
        preset=None,
        command=["preft", *sys.argv[1:]],
        config=config,
        model=config.model.base,
        random_weights=plan.random_weights,
        device=plan.device,
        prefix_caching=config.bench.enable_prefix_caching,
        versions=machine.versions(),
        hardware=machine.hardware(),
        commit=machine.commit(),
        arms=arms,
        ratios=ratios({name: arm.repetitions for name, arm in arms.items()}),
        order=[name for block in blocks for name in block.order],
        same_seed=second,
        failures=sum(arm.failures for arm in arms.values()),
        notes=[*plan.notes, *notes, *measured_notes(plan, arms, second)],
    )


def arms_of(fitted: FittedPlan) -> list[str]:
    """The arms, each once."""
    return list(dict.fromkeys(arm.arm for arm in fitted.plan.arms))


def check_host_memory(fitted: FittedPlan, adapters: Mapping[str, AdapterSet | None]) -> None:
    """Find out before any engine starts: each keeps all of its adapters in host memory, so that no file is read twice.

    Raises:
        UserError: those that are alive at once take more than there is.
    """
    arms = {arm.name: arm.arm for arm in fitted.plan.arms}
    free = machine.free_memory()
    for block in fitted.blocks:
        sets = [adapters[arms[name]] for name in block.engines]
        needed = sum(one.bytes for one in sets if one)
        if needed > free:
            raise UserError(
                f"bench: {', '.join(block.engines)} keep {needed / 1e9:.1f} GB of adapters in host memory, and"
                f" {free / 1e9:.1f} GB are free; lower bench.num_adapters, bench.rank or bench.engines"
            )


def all_adapters(fitted: FittedPlan, base: BaseModel, scratch: Path) -> dict[Form, Made]:
    """The adapters of all arms; arms of one form share them."""
    plan = fitted.plan
    forms = [form for form in dict.fromkeys(map(Form.of, arms_of(fitted))) if form]
    if not forms:
        return {}
    total = plan.num_adapters * len(forms)
    with progress("bench: making adapters", total=total, unit="adapters") as bar:
        return make_adapters(plan, base, forms, scratch, bar.advance)


def run_blocks(
    fitted: FittedPlan, workload: Workload, made: dict[Form, Made], scratch: Path, parts: Parts, out: Path
) -> list[BlockRun]:
    """Measure, with a process for each engine."""
    plan = fitted.plan
    arms = {arm.name: arm for arm in plan.arms}
    requests = scratch / "requests.json"
    requests.write_text(workload.model_dump_json())

    def start(name: str) -> EngineProcess:
        arm, form = arms[name], Form.of(arms[name].arm)
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=scratch))
        spec = EngineSpec(
            arm=arm.arm,
            mode=plan.mode,
            engine_args=arm.engine_args,
            adapters=made[form].paths if form else [],
            plugin=ARMS[arm.arm].plugin,
            residual_stream=plan.residual_stream,
            all_token_adapters=ARMS[arm.arm].adapts_all_tokens,
            load=plan.load,
            seed=plan.seed,
            scratch=folder,
        )
        return EngineProcess(
            name, spec, arm.environment, requests, next(path for path in log_paths(out, name) if not path.exists())
        )

    if not parts.measured:
        for name in arms:
            for old in itertools.takewhile(Path.exists, log_paths(out, name)):
                old.unlink()
    at_once = max(1, cores() // CORES_TO_START[plan.device])
    with Engines(start, at_once) as engines:
        return measure_blocks(fitted.blocks, engines, parts)


def prompt_notes(ready: Ready) -> list[str]:
    """What the prompts have to say."""
    asked = len(ready.workload.warmup) + sum(map(len, ready.workload.repetitions))
    if ready.prompts is None or len(ready.prompts) >= asked:
        return []
    return [f"{len(ready.prompts)} prompts for {asked} requests: they recur"]


def log_paths(out: Path, name: str) -> Iterator[Path]:
    """`bench.lora.log`, `bench.lora.2.log` and so on beside the result: one for each start of an engine."""
    yield out.with_name(f"{out.stem}.{name}.log")
    yield from (out.with_name(f"{out.stem}.{name}.{number}.log") for number in itertools.count(2))
