"""Steps, metrics and results of RL runs that nobody trained."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from preft_cli.bench.results import Hardware
from preft_cli.rl.accuracy import HeldOutAccuracy
from preft_cli.rl.result import RlResult
from preft_cli.rl.stats import StepStats
from preft_cli.rl.summary import RunSummary
from preft_cli.training.metrics import Metrics

PROBLEMS = 200


def stats(step: int = 1, **changes: Any) -> StepStats:
    """A sound step."""
    sound = {
        "reward_mean": 0.3,
        "reward_std": 0.4,
        "reward_low": 0.0,
        "reward_high": 1.0,
        "rewards": {"environment": 0.3},
        "solved_share": 0.3,
        "tied_share": 0.4,
        "length_mean": 12.0,
        "cut_share": 0.1,
        "loss": 0.01,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "kl": 0.01,
        "clip_ratio": 0.02,
        "entropy": 0.8,
        "ratio_mean": 1.001,
        "logprob_gap_mean": 0.012,
        "logprob_gap_max": 0.2,
        "generated_tokens": 3000,
        "seconds_generation": 1.5,
        "seconds_rewards": 0.05,
        "seconds_sync": 0.002,
        "seconds_training": 0.9,
        "seconds_total": 2.6,
        "sync_bytes": 9_800_000,
    }
    return StepStats(step=step, **(sound | changes))


def write_run(metrics: Metrics, steps: int = 60, gain: float = 0.4, seed: int = 0, every: int = 20) -> None:
    """Metrics of a run whose reward rises by `gain` from 0.2."""
    draw = random.Random(seed)
    metrics.accuracy(0, "base", 42, PROBLEMS)
    for step in range(1, steps + 1):
        done = 1 - math.exp(-3 * step / steps)
        solved = min(1.0, max(0.0, 0.2 + gain * done + draw.gauss(0, 0.05)))
        changes = {
            "reward_mean": solved,
            "reward_std": math.sqrt(solved * (1 - solved)),
            "rewards": {"environment": solved},
            "solved_share": solved,
            "tied_share": min(1.0, 0.3 + 0.3 * done + draw.gauss(0, 0.08)),
            "entropy": 1.2 - 0.8 * done,
            "kl": 0.08 * done,
            "length_mean": 14 - 6 * done + draw.gauss(0, 0.5),
            "cut_share": max(0.0, 0.2 - 0.2 * done),
            "clip_ratio": abs(draw.gauss(0.01, 0.01)),
            "ratio_mean": 1 + draw.gauss(0, 0.003),
            "logprob_gap_mean": abs(draw.gauss(0.012, 0.002)),
            "logprob_gap_max": abs(draw.gauss(0.3, 0.1)),
            "seconds_generation": 1.5 - 0.5 * done + draw.gauss(0, 0.05),
            "seconds_sync": abs(draw.gauss(0.0025, 0.0004)),
        }
        metrics.train(**stats(step, **changes).row())
        if step % every == 0:
            metrics.accuracy(step, "adapter", round(PROBLEMS * (0.2 + gain * done + draw.gauss(0, 0.02))), PROBLEMS)


def held_out(adapter: int, base: int = 42, digest: str = "problems", constant: int | None = 30) -> HeldOutAccuracy:
    """From how many of the problems each solves; the adapter loses three that the base model solves."""
    solved = [at < base for at in range(PROBLEMS)], [3 <= at < adapter + 3 for at in range(PROBLEMS)]
    return HeldOutAccuracy.of(*solved, digest=digest, constant=None if constant is None else ("3", constant))


def rl_result(folder: Path, measured: HeldOutAccuracy | None, **changes: Any) -> RlResult:
    """The result of the run whose metrics lie in `folder`."""
    known: dict[str, Any] = {
        "adapter": "gcd",
        "method": "lorap",
        "base_model": "owner/model",
        "digest": "abc",
        "steps": 60,
        "epochs": 0.5,
        "rows": 1000,
        "dropped": 0,
        "held_out": measured,
        "trainable_parameters": 4_880_000,
        "ranks": {"lora": 16},
        "parameters": {"lora": 4_880_000},
        "seconds": 160.0,
        "peak_memory": 3 << 30,
        "device": "cuda",
        "dtype": "bfloat16",
        "seed": 0,
        "artefacts": {"adapter": folder / "adapter"},
        "config": {},
        "versions": {},
        "hardware": Hardware(cpu="a CPU", cores=2, memory_gib=8.0, gpus=[]),
        "git_commit": None,
        "summary": RunSummary.of(Metrics(folder / "metrics.jsonl").rows()),
    }
    return RlResult.model_validate(known | changes)
