"""`preft bench`: run the arms in turn, compare them, write the result."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from engine_patch.rule import parts
from preft_cli.adapters.base import BaseFacts
from preft_cli.bench import machine
from preft_cli.bench.adapters import make_adapters
from preft_cli.bench.arms import ARMS
from preft_cli.bench.compare import check_comparable
from preft_cli.bench.plan import ArmPlan, BenchPlan, plan_bench
from preft_cli.bench.process import run_worker
from preft_cli.bench.results import AdapterSet, ArmResult, BenchResult, Spread, WorkerResult, ratios, write_json
from preft_cli.bench.sizes import check_lengths, kv_cache_bytes, vocab_size
from preft_cli.bench.worker import Progress, WorkerSpec
from preft_cli.bench.workload import make_workload
from preft_cli.config.schema import PreftConfig
from preft_cli.console import progress
from preft_cli.errors import UserError
from preft_cli.models import BaseModel, resolve


def bench(config: PreftConfig, root: Path, out: Path | None = None) -> BenchResult:
    """Measure the arms of `config.bench` and write the result.

    Args:
        config: the project's config.
        root: folder of the config file.
        out: the result's file; default `runs/bench/<time>.json` under `root`. Logs lie beside it.

    Returns:
        The result; `failures` counts requests that did not get the tokens they asked for.

    Raises:
        UserError: bad settings, an arm whose process failed, or arms that do not compare.
    """
    created = datetime.now(UTC)
    plan = plan_bench(config, root)
    out = result_path(root, out, created)
    base = resolve(config.model.base, root)
    check_methods(plan, base)
    plan = plan.for_model(base.path, kv_cache_bytes(plan, config.bench.max_num_seqs, base))
    check_lengths(plan, base)
    with tempfile.TemporaryDirectory(prefix="preft-bench-") as scratch:
        requests = Path(scratch) / "requests.json"
        requests.write_text(make_workload(plan, vocab_size(base)).model_dump_json())
        arms = {arm.arm: run_arm(arm, plan, base, requests, out) for arm in plan.arms}
    check_comparable(arms)
    result = BenchResult(
        created=created,
        config=config,
        model=config.model.base,
        random_weights=plan.random_weights,
        device=plan.device,
        versions=machine.versions(),
        hardware=machine.hardware(),
        commit=machine.commit(),
        arms=arms,
        ratios=ratios({name: arm.requests_per_second for name, arm in arms.items()}),
        failures=sum(arm.failures for arm in arms.values()),
        notes=plan.notes,
        path=out,
    )
    write_json(result, out)
    return result


def check_methods(plan: BenchPlan, base: BaseModel) -> None:
    """Refuse, before any engine starts, an arm whose method cannot act on the base model.

    Raises:
        UserError: names the arm.
    """
    for arm in plan.arms:
        if "direft" in parts(ARMS[arm.arm].method or ""):
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


def run_arm(arm: ArmPlan, plan: BenchPlan, base: BaseModel, requests: Path, out: Path) -> ArmResult:
    """Make the arm's adapters, run its process, remove the adapters."""
    kind = ARMS[arm.arm]
    log = out.with_name(f"{out.stem}.{arm.arm}.log")
    with tempfile.TemporaryDirectory(prefix=f"{arm.arm}-", dir=requests.parent) as scratch:
        folder = Path(scratch)
        paths: list[Path] = []
        adapters = None
        if kind.adapters != "none":
            (folder / "adapters").mkdir()
            with progress(f"bench {arm.arm}: making adapters", total=plan.num_adapters, unit="adapters") as bar:
                paths, adapters = make_adapters(
                    kind, plan, base, folder / "adapters", arm.engine_args["dtype"], bar.advance
                )
        spec = WorkerSpec(
            arm=arm.arm,
            engine_args=arm.engine_args,
            requests=requests,
            adapters=paths,
            plugin=kind.plugin,
            residual_stream=plan.residual_stream,
            progress=folder / "progress.jsonl",
        )
        result = watch_worker(spec, arm, plan.repeats, folder, log)
    return arm_result(arm, result, adapters, log.name)


def watch_worker(spec: WorkerSpec, arm: ArmPlan, repeats: int, folder: Path, log: Path) -> WorkerResult:
    """Run the arm's process and show how far it is: first its start, then the warm-up and each repetition."""
    with ExitStack() as shown:
        bar = shown.enter_context(progress(f"bench {arm.arm}: starting the engine"))

        def on_progress(ended: Progress) -> None:
            nonlocal bar
            if ended.phase == "start":
                shown.close()
                bar = shown.enter_context(progress(f"bench {arm.arm}: running", total=repeats + 1, unit="passes"))
            else:
                bar.advance(note=ended.note)

        return run_worker(spec, arm.environment, folder, log, on_progress=on_progress)


def arm_result(arm: ArmPlan, worker: WorkerResult, adapters: AdapterSet | None, log: str) -> ArmResult:
    """What the process reported, with the statistics of its repetitions."""
    return ArmResult(
        **dict(worker),
        description=arm.description,
        engine_args=arm.engine_args,
        environment=arm.environment,
        adapters=adapters,
        requests_per_second=Spread.of([r.requests_per_second for r in worker.repetitions]),
        output_tokens_per_second=Spread.of([r.tokens_per_second for r in worker.repetitions]),
        seconds=Spread.of([r.seconds for r in worker.repetitions]),
        failures=sum(r.failures for r in worker.repetitions),
        log=log,
    )
