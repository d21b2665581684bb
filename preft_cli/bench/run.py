"""`preft bench`: let the arms take turns on the same requests, compare them, write the result."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from engine_patch.rule import parts as method_parts
from preft_cli.adapters.base import BaseFacts
from preft_cli.bench import machine
from preft_cli.bench.adapters import Form, Made, make_adapters
from preft_cli.bench.arms import ARMS
from preft_cli.bench.assemble import arm_results, measured_notes, second_times
from preft_cli.bench.comparable import check_adapters
from preft_cli.bench.device import Device
from preft_cli.bench.engine import EngineSpec
from preft_cli.bench.fit import FittedPlan, fit
from preft_cli.bench.footprint import model_config
from preft_cli.bench.measure import Engines, measure_blocks
from preft_cli.bench.parts import Parts
from preft_cli.bench.plan import BenchPlan, plan_bench
from preft_cli.bench.process import EngineProcess
from preft_cli.bench.prompts import read_prompts
from preft_cli.bench.ratios import ratios
from preft_cli.bench.results import AdapterSet, BenchResult, BlockRun, write_json
from preft_cli.bench.workload import Workload, make_workload
from preft_cli.config.schema import PreftConfig
from preft_cli.console import progress
from preft_cli.errors import UserError
from preft_cli.models import BaseModel, resolve

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
    plan = plan_bench(config, root)
    out = result_path(root, out, created)
    base = resolve(config.model.base, root)
    check_methods(plan, base)
    prompts = read_prompts(plan.prompts, base, config.model.chat_template) if plan.prompts else None
    workload = make_workload(plan, model_config(base)["vocab_size"], prompts)
    parts = Parts(out, plan, workload, resume=resume)
    fitted = parts.fitted = parts.fitted or fit(plan, base, workload)
    with tempfile.TemporaryDirectory(prefix="preft-bench-") as scratch:
        made = all_adapters(fitted, base, Path(scratch))
        adapters = {arm: made[form].described if (form := Form.of(arm)) else None for arm in arms_of(fitted)}
        check_adapters(adapters)
        check_host_memory(fitted, adapters)
        blocks = run_blocks(fitted, workload, made, Path(scratch), parts, out)
    arms = arm_results(fitted.plan, blocks, adapters)
    second = second_times(arms)
    notes = [*plan.notes, *fitted.notes, *prompt_notes(workload, prompts), *measured_notes(plan, arms, second)]
    result = BenchResult(
        created=created,
        seconds=time.monotonic() - began,
        command=["preft", *sys.argv[1:]],
        preset=preset,
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
        notes=notes,
        path=out,
    )
    write_json(result, out)
    parts.remove()
    return result


def arms_of(fitted: FittedPlan) -> list[str]:
    """The arms, each once."""
    return list(dict.fromkeys(arm.arm for arm in fitted.plan.arms))


def check_methods(plan: BenchPlan, base: BaseModel) -> None:
    """Refuse, before any engine starts, an arm whose method cannot act on the base model.

    Raises:
        UserError: names the arm.
    """
    for arm in plan.arms:
        if "direft" in method_parts(ARMS[arm.arm].method or ""):
            BaseFacts.of(base, plan.residual_stream).require_streams(f"bench.arms: {arm.arm}", exit_code=2)


def result_path(root: Path, out: Path | None, created: datetime) -> Path:
    """Where the result goes; its folder is made now, so that a bad path fails before the work and not after it."""
    path = (out or root / "runs" / "bench" / f"{created:%Y%m%d-%H%M%S}.json").absolute()
    if path.is_dir():
        raise UserError(f"--out {path} is a folder; give the name of a file", exit_code=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"cannot write results to {path.parent}: {error.strerror}; give another --out") from error
    return path


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
    starts = dict.fromkeys(arms, 0)

    def start(name: str) -> EngineProcess:
        arm, form = arms[name], Form.of(arms[name].arm)
        starts[name] += 1
        number = "" if starts[name] == 1 else f".{starts[name]}"
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=scratch))
        spec = EngineSpec(
            arm=arm.arm,
            mode=plan.mode,
            engine_args=arm.engine_args,
            adapters=made[form].paths if form else [],
            plugin=ARMS[arm.arm].plugin,
            residual_stream=plan.residual_stream,
            load=plan.load,
            seed=plan.seed,
            scratch=folder,
        )
        return EngineProcess(name, spec, arm.environment, requests, out.with_name(f"{out.stem}.{name}{number}.log"))

    at_once = max(1, machine.usable_cores() // CORES_TO_START[plan.device])
    with Engines(start, at_once) as engines:
        return measure_blocks(fitted.blocks, engines, parts)


def prompt_notes(workload: Workload, prompts: list[list[int]] | None) -> list[str]:
    """What the prompts have to say."""
    asked = len(workload.warmup) + sum(map(len, workload.repetitions))
    if prompts is None or len(prompts) >= asked:
        return []
    return [f"{len(prompts)} prompts for {asked} requests: they recur"]
