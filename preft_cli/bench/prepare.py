"""What is found out about a benchmark before anything is written or started."""

from __future__ import annotations

import tempfile
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from engine_patch.rule import parts
from preft_cli.adapters.base import BaseFacts
from preft_cli.bench.arms import ARMS
from preft_cli.bench.load import load_result
from preft_cli.bench.plan import BenchPlan, plan_bench
from preft_cli.bench.prompts import read_prompts
from preft_cli.bench.results import BenchResult
from preft_cli.bench.workload import Workload, make_workload
from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.models import BaseModel, resolve


class Ready(NamedTuple):
    """A benchmark before anything is written or started."""

    plan: BenchPlan
    base: BaseModel
    prompts: list[list[int]] | None
    workload: Workload


def prepare(config: PreftConfig, root: Path) -> Ready:
    """Everything that can be found out about a benchmark without doing it.

    Raises:
        UserError: bad settings, no such model or prompts, or requests that are longer than the model allows.
    """
    plan = plan_bench(config, root)
    base = resolve(config.model.base, root)
    check_methods(plan, base)
    prompts = read_prompts(plan.prompts, base, config.model.chat_template) if plan.prompts else None
    model = base.hf_config.get_text_config()
    workload = make_workload(plan, model.vocab_size, prompts)
    longest, allowed = sum(workload.longest), getattr(model, "max_position_embeddings", None)
    if allowed is not None and longest > allowed:
        raise UserError(
            f"bench.prompt_len + output_len is {longest}; {plan.model} allows {allowed} tokens", exit_code=2
        )
    return Ready(plan, base, prompts, workload)


def finished(out: Path, config: PreftConfig) -> BenchResult | None:
    """The result of an earlier run at `out`, if it is one of the same config and nothing in it failed."""
    try:
        result = load_result(out)
    except UserError:
        return None
    same = result.config.model_dump(mode="json") == config.model_dump(mode="json")
    return result if same and not result.failures else None


def check_methods(plan: BenchPlan, base: BaseModel) -> None:
    """Refuse, before any engine starts, an arm whose method cannot act on the base model.

    Raises:
        UserError: names the arm.
    """
    for arm in plan.arms:
        if "direft" in parts(ARMS[arm.arm].method or ""):
            BaseFacts.of(base, plan.residual_stream).require_streams(f"bench.arms: {arm.arm}", exit_code=2)


def result_path(root: Path, out: Path | None, created: datetime) -> Path:
    """Where the result goes; its folder is made now, so that a bad path fails before the work and not after it.

    Raises:
        UserError: a folder, another name than FILE.json (picture and CSV lie beside it), or a place that cannot be written.
    """
    path = (out or root / "runs" / "bench" / f"{created:%Y%m%d-%H%M%S}.json").absolute()
    if path.is_dir():
        raise UserError(f"--out {path} is a folder; give the name of a .json file", exit_code=2)
    if path.suffix != ".json":
        raise UserError(f"--out {path}: give the name of a .json file; picture and CSV go beside it", exit_code=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"cannot write results to {path.parent}: {error.strerror}; give another --out", 2) from error
    return path
