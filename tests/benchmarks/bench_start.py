"""Does a large folder of adapters slow the start of the server? python -m tests.benchmarks.bench_start

Time from `preft serve --adapters DIR` to the first 200 of /health, with 10 and with 10,000 adapters in DIR, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_patch.store.digest import pages_digest
from engine_patch.store.file import encode
from engine_patch.store.format import encode_header
from preft_cli.models import BaseModel, modules_of
from tests.benchmarks import common
from tests.benchmarks.material import random_adapter
from tests.schedules.models import tiny_llama
from tests.unit.tiny import tiny_tokenizer

SERVE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "gpu_slots": 4,
    "gpu_pool": "64MiB",
    "host_pool": "64MiB",
    # Graphs take a minute on a GPU and have nothing to do with the folder.
    "vllm_args": {"enforce-eager": True, "block-size": 32},
}
"""The section `serve` of the config: the only place that knows its keys."""

START_TIMEOUT_S = 300.0
POLL_S = 0.02
ALLOWED_SECONDS = 2.0
"""By which the large folder may start later."""


def make_model(folder: Path) -> BaseModel:
    """A tiny model that a server can load."""
    base = tiny_llama(folder)
    tiny_tokenizer().save_pretrained(folder)
    return base


def make_folder(folder: Path, base: BaseModel, count: int) -> None:
    """`count` adapters on all modules; written directly, since `write_adapter` waits for the disk each time."""
    folder.mkdir()
    header, pages = encode(random_adapter(base.fingerprint, modules_of(base).linear, 4, seed=0))
    data = bytearray(pages)
    for index in range(count):
        data[:4] = index.to_bytes(4, "little")
        digest = pages_digest(header.method, header.dtype, header.groups, memoryview(data))
        (folder / f"a{index:05d}.preft").write_bytes(encode_header(replace(header, digest=digest)) + data)


def start_seconds(project: Path, adapters: Path, count: int) -> dict[str, float]:
    """Start a server, wait until it is healthy, check that it lists all adapters, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "preft_cli", "serve", "--adapters", str(adapters), "--port", str(port)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    log = project / "log.txt"
    with log.open("w") as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=project, env=environment, stdout=output, stderr=output)
    try:
        while get(port, "/health") is None:
            if process.poll() is not None or time.perf_counter() - started > START_TIMEOUT_S:
                raise RuntimeError(f"the server did not come up:\n{log.read_text()[-3000:]}")
            time.sleep(POLL_S)
        healthy = time.perf_counter() - started
        listed = len(json.loads(get(port, "/v1/models") or b"{}").get("data", ())) - 1  # the base model is one
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)
    if listed != count:
        raise RuntimeError(f"the server lists {listed} of {count} adapters:\n{log.read_text()[-3000:]}")
    return {"adapters": count, "seconds_to_health": healthy}


def get(port: int, path: str) -> bytes | None:
    """The body of a 200; None as long as there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return bytes(answer.read()) if answer.status == 200 else None
    except OSError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--counts", default="10,10000", help="a small and a large number of adapters")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-warm-up", action="store_true", help="without the first start, which fills caches")
    options = parser.parse_args()
    few, many = map(int, options.counts.split(","))
    with tempfile.TemporaryDirectory(prefix="bench-start-") as temporary:
        project = Path(temporary)
        base = make_model(project / "tiny")
        (project / "preft.yaml").write_text(json.dumps({"model": {"base": "tiny"}, "serve": SERVE}))
        for count in (few, many):
            make_folder(project / str(count), base, count)
        if not options.no_warm_up:
            start_seconds(project, project / str(few), few)
        runs = []
        for repetition in range(options.repeats):
            pair = (few, many) if repetition % 2 == 0 else (many, few)
            for count in pair:
                runs.append(start_seconds(project, project / str(count), count))
                common.say(str(runs[-1]))
    times = {count: [run["seconds_to_health"] for run in runs if run["adapters"] == count] for count in (few, many)}
    difference = common.spread([b - a for a, b in zip(times[few], times[many], strict=True)])
    result = {
        **common.about("start", **{name: str(value) for name, value in vars(options).items()}, serve=SERVE),
        "ratios": {f"{many}/{few}": common.spread(common.quotients(times[many], times[few]))},
        "seconds_to_health": {str(count): common.spread(of) for count, of in times.items()},
        "difference_seconds": difference,
        "allowed_seconds": ALLOWED_SECONDS,
        "passed": difference["median"] < ALLOWED_SECONDS,
        "runs": runs,
    }
    common.write(options.out, result)
    common.say(f"difference {difference}")
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
