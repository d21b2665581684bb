"""How fast `preft train` steps beside TRL's SFTTrainer with plain LoRA: `python -m tests.benchmarks.bench_training [--out FILE]`.

    pip install trl==1.16.0

Same rows, batch size, rank, modules, type, attention (sdpa), optimizer; loss on completions alone, no gradient checkpointing.
All arms train in one process, one epoch after the other in turn; time runs from the first step to the end of the last, data
loading and optimizer included. Tokens are those of all rows, prompt and completion, as if nothing were shared. On a machine
with other work on it look at the CPU seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from preft_cli.data import Row
from tests.benchmarks.common import about, in_turn, quotients, say, spread, synchronise, write
from tests.benchmarks.training_arms import ARMS, Setting
from tests.benchmarks.training_rows import CASES


class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """From the beginning of the first step to the end of the last."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            synchronise()
            self._begun = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == state.max_steps:
            synchronise()
            self.seconds = time.perf_counter() - self._begun[0]
            self.cpu_seconds = time.process_time() - self._begun[1]
            self.steps = state.global_step


class Arm:
    """One trainer that trains as often as asked."""

    def __init__(self, name: str, setting: Setting, rows: list[Row], folder: Path) -> None:
        self.trainer = ARMS[name](setting, rows, folder)
        self.clock = Clock()
        self.trainer.add_callback(self.clock)
        for callback in (PrinterCallback, ProgressCallback):
            self.trainer.remove_callback(callback)
        self.cpu_seconds: list[float] = []

    def epoch(self) -> float:
        """Seconds of one epoch."""
        self.trainer.train()
        self.cpu_seconds.append(self.clock.cpu_seconds)
        return self.clock.seconds


def measure(case: str, setting: Setting, arms: list[str], repeats: int, num_rows: int) -> dict[str, Any]:
    """All repetitions of one case."""
    rows = CASES[case](num_rows, setting.vocabulary, setting.limit)
    tokens = sum(map(len, rows))
    with tempfile.TemporaryDirectory() as folder:
        built = {name: Arm(name, setting, rows, Path(folder) / name) for name in arms}
        for name, arm in built.items():
            say(f"{case}: {name} warms up, {arm.epoch():.1f} s")
            arm.cpu_seconds.clear()
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for repetition in range(repeats):
            for name, took in in_turn({name: arm.epoch for name, arm in built.items()}, repetition).items():
                seconds[name].append(took)
            say(f"{case}: {', '.join(f'{name} {tokens / seconds[name][-1]:.0f} tok/s' for name in arms)}")
    return {
        "rows": len(rows),
        "tokens": tokens,
        "prompt_tokens": sum(len(row.prompt_ids) for row in rows),
        "steps": {name: arm.clock.steps for name, arm in built.items()},
        "tokens_per_s": {name: spread([tokens / one for one in taken]) for name, taken in seconds.items()},
        "rows_per_s": {name: spread([len(rows) / one for one in taken]) for name, taken in seconds.items()},
        "seconds": seconds,
        "cpu_seconds": {name: arm.cpu_seconds for name, arm in built.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="Hub id, folder, smollm2-135m, or random:SHAPE")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16")
    parser.add_argument("--rows", type=int, default=64, help="of each case")
    parser.add_argument("--limit", type=int, default=256, help="prompt and completion tokens of the longest row")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--arms", nargs="+", default=["trl", "preft"], choices=list(ARMS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    setting = Setting.of(args.model, args.dtype, args.batch_size, args.rank, args.limit)
    asked = {key: value for key, value in vars(args).items() if key != "out"} | {"dtype": setting.precision.name}
    result = about("training", **asked)
    result["versions"] |= {name: metadata.version(name) for name in ("trl", "peft", "accelerate", "transformers")}
    result["threads"] = torch.get_num_threads()
    cases = {case: measure(case, setting, args.arms, args.repeats, args.rows) for case in args.cases}
    first, *others = args.arms
    result["ratios_said"] = (
        "median, low and high of the ratios of repetitions, whose arms were measured one after the other"
    )
    result["ratios"] = {
        f"{name}/{first} tokens per second, {case}" + told: spread(quotients(one[key][first], one[key][name]))
        for case, one in cases.items()
        for name in others
        for key, told in (("seconds", ""), ("cpu_seconds", ", by CPU seconds"))
    }
    write(args.out, result | {"cases": cases})


if __name__ == "__main__":
    main()
