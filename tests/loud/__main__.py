"""Draw the requests, drive one engine, judge all answers, and print one line of JSON; ends with 1 if anything is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from preft_cli.threads import wait_politely
from tests.loud.adapters import MOST, material
from tests.loud.draw import SETTING, draw
from tests.loud.judge import BOUND, judge
from tests.schedules.__main__ import versions
from tests.schedules.drive import Driver, engine
from tests.schedules.mutations import MUTATIONS
from tests.schedules.seen import Seen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.loud", description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--adapters", type=int, default=MOST, choices=range(1, MOST + 1), metavar=f"1..{MOST}")
    parser.add_argument("--dtype", choices=sorted(BOUND), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="plant this fault")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    wait_politely()
    if arguments.mutation:
        MUTATIONS[arguments.mutation]()
    with tempfile.TemporaryDirectory() as folder:
        report, misses = run(arguments, Path(folder))
    for miss in misses[:20]:
        print(miss, file=sys.stderr)
    text = json.dumps({**vars(arguments), "out": None, **report, "misses": len(misses)})
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    sys.exit(1 if misses else 0)


def run(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, object], list[str]]:
    """The whole run: what it has shown and seen, and what is wrong."""
    times = [time.monotonic()]
    used = material(folder, arguments.adapters, arguments.dtype)
    times.append(time.monotonic())
    seen = Seen()
    schedule = draw(arguments.seed, arguments.requests, arguments.adapters, used.vocab)
    with engine(used.path, dataclasses.replace(SETTING, dtype=arguments.dtype), used.files) as llm:
        times.append(time.monotonic())
        with seen.watch(llm):
            answers = Driver(llm, used.files, temperature=0.0).run(schedule)
        times.append(time.monotonic())
    verdict = judge(schedule, answers, used, arguments.dtype)
    times.append(time.monotonic())
    steps = ("adapters", "engine_start", "requests", "judging")
    seconds = {name: round(end - begin, 1) for name, begin, end in zip(steps, times, times[1:], strict=False)}
    report = {**dataclasses.asdict(verdict), **dataclasses.asdict(seen), **versions()}
    return {**report, "seconds": round(times[-1] - times[0], 1), "seconds_by_part": seconds}, verdict.misses


if __name__ == "__main__":
    main()
