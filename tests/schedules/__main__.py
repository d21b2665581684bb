"""The command: draw, drive, check, and print one line of JSON with what was seen."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch

from engine_patch.rule import METHODS
from preft_cli.threads import wait_politely
from tests.schedules.check import HALF, Tally, check, check_spread
from tests.schedules.draw import SETTINGS, EngineSetting, draw
from tests.schedules.drive import Driver, engine
from tests.schedules.models import Material, material
from tests.schedules.mutations import MUTATIONS
from tests.schedules.seen import Seen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.schedules", description=__doc__)
    parser.add_argument("--schedules", type=int, default=200, help="how many, shared out among the engines")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others count up from it")
    parser.add_argument("--model", default="tiny", help="tiny, or a model.base")
    parser.add_argument("--method", choices=sorted(METHODS), help="of all adapters; without it there are all kinds")
    parser.add_argument("--asks", type=int, default=8, help="most requests of a schedule")
    parser.add_argument(
        "--engine", type=int, action="append", help="only this one of the settings in draw.py; repeatable"
    )
    parser.add_argument("--dtype", choices=["float32", *HALF], default="float32")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="plant this fault")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    wait_politely()
    if arguments.mutation:
        MUTATIONS[arguments.mutation]()
    began = time.monotonic()
    tally, seen = Tally(), Seen()
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, material(arguments.model, Path(folder), arguments.method), tally, seen)
    for miss in tally.misses[:20]:
        print(miss, file=sys.stderr)
    report = {
        **tally.summary(),
        **dataclasses.asdict(seen),
        **versions(),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time(), 1),  # those of this process, whatever else the machine does
    }
    text = json.dumps({**vars(arguments), "out": None, **report})
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    sys.exit(1 if tally.misses else 0)


def run(arguments: argparse.Namespace, used: Material, tally: Tally, seen: Seen) -> None:
    """All schedules, each engine's in turn; stops at the first that misses."""
    exact = arguments.dtype == "float32"
    chosen = list(settings(arguments))
    for turn, (index, setting) in enumerate(chosen):
        seeds = range(arguments.seed + turn, arguments.seed + arguments.schedules, len(chosen))
        with engine(used.path, setting, used.files) as llm:
            driver = Driver(llm, used.files)
            with seen.watch(llm):
                for seed in seeds:
                    torch.manual_seed(seed)  # of the sampler
                    schedule = draw(seed, used.vocab, len(used.files), arguments.asks)
                    check(schedule, driver.run(schedule), used, tally, f"engine {index}, schedule {seed}", exact)
                    if tally.misses:
                        return
        tally.reloads_midway += driver.reloads_midway
        print(f"engine {index}: {tally.schedules} schedules", file=sys.stderr, flush=True)
    if not exact:
        check_spread(tally, arguments.dtype)


def settings(arguments: argparse.Namespace) -> Iterator[tuple[int, EngineSetting]]:
    """The engines to start, with their numbers."""
    for index in arguments.engine or range(len(SETTINGS)):
        asked = {"dtype": arguments.dtype, "tensor_parallel": arguments.tensor_parallel, "eager": arguments.eager}
        yield index, dataclasses.replace(SETTINGS[index], **asked)


def versions() -> dict[str, Any]:
    """Of what computed, and on what."""
    import importlib.metadata

    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None
    return {
        "schema_version": 1,
        "commit": commit,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "preft": importlib.metadata.version("preft"),
        "device": device,
    }


if __name__ == "__main__":
    main()
