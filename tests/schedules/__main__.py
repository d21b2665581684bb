"""The command: draw, drive, check, and print one line of JSON with what was seen."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch

from preft_cli.threads import wait_politely
from tests.schedules.check import Tally, check
from tests.schedules.draw import SETTINGS, draw
from tests.schedules.drive import Driver, engine
from tests.schedules.models import Material, material
from tests.schedules.mutations import MUTATIONS
from tests.schedules.seen import Seen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.schedules", description=__doc__)
    parser.add_argument("--schedules", type=int, default=200, help="how many, shared out among the engines")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others count up from it")
    parser.add_argument("--model", default="tiny", help="tiny, or a model.base")
    parser.add_argument("--asks", type=int, default=8, help="most requests of a schedule")
    parser.add_argument("--engine", type=int, action="append", help="only these of the settings in draw.py")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="plant this fault")
    arguments = parser.parse_args()
    wait_politely()
    if arguments.mutation:
        MUTATIONS[arguments.mutation]()
    began = time.monotonic()
    tally, seen = Tally(), Seen()
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, material(arguments.model, Path(folder)), tally, seen)
    for miss in tally.misses[:20]:
        print(miss, file=sys.stderr)
    report = dataclasses.asdict(tally) | dataclasses.asdict(seen) | {"seconds": round(time.monotonic() - began, 1)}
    print(json.dumps({**vars(arguments), **report, "misses": len(tally.misses)}))
    sys.exit(1 if tally.misses else 0)


def run(arguments: argparse.Namespace, used: Material, tally: Tally, seen: Seen) -> None:
    """All schedules, each engine's in turn; stops at the first that misses."""
    engines = arguments.engine or range(len(SETTINGS))
    for turn, index in enumerate(engines):
        seeds = range(arguments.seed + turn, arguments.seed + arguments.schedules, len(engines))
        with engine(used.path, SETTINGS[index]) as llm:
            driver = Driver(llm, used.files)
            with seen.watch(llm):
                for seed in seeds:
                    torch.manual_seed(seed)  # of the sampler
                    answers = driver.run(draw(seed, used.vocab, len(used.files), arguments.asks))
                    check(answers, used, tally, f"engine {index}, schedule {seed}")
                    if tally.misses:
                        return
        print(f"engine {index}: {tally.schedules} schedules, worst {tally.worst:.2g}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
