"""Where the time of a busy engine goes: python -m tests.benchmarks.profile_step --arms base lorap direftp --out FILE.json

By kind of step (those that hold prompt tokens, and pure decode steps), on the GPU and on the host. One engine for each arm, each
in a process of its own with scheduler and worker in its main thread; they start side by side, and one works at a time. Each
answers the same requests again and again: to warm up, twice with nothing but the clock, with timers around the parts of a
step, under torch.profiler (GPU activity of some steps), and under cProfile. Only the plain passes say how fast the engine is.

`preft bench` on a GPU has the engine core in a process of its own: there the parts "outputs" and "before the first step" overlap
with the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from preft_cli.bench.adapters import Form, Made
from preft_cli.bench.arms import ARMS, BASE
from preft_cli.bench.engine import EngineSpec
from preft_cli.bench.fit import FittedPlan, fit
from preft_cli.bench.plan import ArmPlan
from preft_cli.bench.prepare import prepare
from preft_cli.bench.process import EngineProcess
from preft_cli.bench.run import all_adapters
from preft_cli.config.schema import BenchConfig, ModelConfig, PreftConfig
from preft_cli.errors import UserError
from preft_cli.threads import wait_politely
from tests.benchmarks import common
from tests.benchmarks.common import say
from tests.benchmarks.profile_report import MARK, PLAIN_PASSES, REPORT, Report, table

PASSES = 1 + PLAIN_PASSES + 3


class OutOfTimeError(Exception):
    """`--limit` is over."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the results; logs of the engines lie beside it")
    parser.add_argument("--model", default="smollm2-135m", help="as model.base takes it")
    parser.add_argument("--arms", nargs="+", default=[BASE, "lorap"], choices=list(ARMS))
    parser.add_argument("--adapters", type=int, default=512)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens")
    parser.add_argument("--seqs", type=int, default=512, help="requests that run at once")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--gpu-steps", type=int, default=32, help="steps of each kind under torch.profiler, at most")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which everything is ended")
    options = parser.parse_args()
    wait_politely()
    with tempfile.TemporaryDirectory(prefix="preft-profile-") as scratch:
        Profile(options, Path(scratch)).run()


class Profile:
    """The arms' processes, and what they found."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        self._began = time.monotonic()
        self._children: dict[str, Child] = {}
        self._failures: list[str] = []

    def run(self) -> None:
        """Everything."""
        idle = False
        try:
            self._start()
            for doing in (Child.wait_started, Child.measure):
                for child in self._children.values():
                    try:
                        doing(child, self._watch)
                    except UserError as error:
                        self._failures.append(str(error))
                        say(str(error))
                    self._write()
            idle = True
        except OutOfTimeError:
            self._failures.append(f"stopped after {self._options.limit:g} s")
        finally:
            reports = self._write()
            print(table(reports), *self._failures, sep="\n", flush=True)
            with ThreadPoolExecutor(len(ARMS)) as pool:
                list(pool.map(lambda child: child.process.stop(idle=idle), self._children.values()))

    def _start(self) -> None:
        ready = prepare(config(self._options), Path.cwd())
        fitted = fit(ready.plan, ready.base, ready.workload)
        for note in (*fitted.plan.notes, *fitted.notes):
            say(f"note: {note}")
        (self._scratch / "requests.json").write_text(ready.workload.model_dump_json())
        arms = [arm for arm in fitted.plan.arms if arm.arm in self._options.arms]
        made: dict[Form, Made] = {}
        for arm in sorted(arms, key=lambda arm: arm.adapters != "none"):  # those without start while adapters are made
            if (form := Form.of(arm.arm)) and not made:
                made = all_adapters(fitted, ready.base, self._scratch)
            self._children[arm.name] = Child(self._spec(arm, fitted, made[form].paths if form else []), arm, self)
            say(f"{self.seconds:.0f} s: {arm.name} starts")
            self._watch()

    def _spec(self, arm: ArmPlan, fitted: FittedPlan, adapters: list[Path]) -> EngineSpec:
        return EngineSpec(
            arm=arm.arm,
            mode="offline",
            engine_args=arm.engine_args,
            adapters=adapters,
            plugin=ARMS[arm.arm].plugin,
            residual_stream=fitted.plan.residual_stream,
            scratch=Path(tempfile.mkdtemp(prefix=f"{arm.name}-", dir=self._scratch)),
        )

    def log(self, name: str) -> Path:
        """Of an arm's engine."""
        out: Path | None = self._options.out
        if out is None:
            return self._scratch / f"{name}.log"
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.with_name(f"{out.stem}.{name}.log")

    @property
    def requests(self) -> Path:
        return self._scratch / "requests.json"

    @property
    def child_command(self) -> tuple[str, ...]:
        """Lacks the path of the spec."""
        steps = str(self._options.gpu_steps)
        return (sys.executable, "-m", "tests.benchmarks.profile_passes", steps)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def _watch(self) -> None:
        for child in self._children.values():
            child.echo()
        if self.seconds > self._options.limit:
            raise OutOfTimeError

    def _write(self) -> dict[str, Report]:
        """What is known so far."""
        reports = {name: found for name, child in self._children.items() if (found := child.report())}
        if self._options.out:
            settings = {name: str(value) for name, value in vars(self._options).items()}
            base = reports[BASE].seconds if BASE in reports else None
            result = {
                **common.about("profile of steps", **settings),
                "seconds": self.seconds,
                "failures": self._failures,
                "ratios": {
                    f"{name}/{BASE}": base / one.seconds for name, one in reports.items() if base and one.seconds
                },
                "arms": {name: one.model_dump() for name, one in reports.items()},
            }
            self._options.out.write_text(json.dumps(result, indent=1) + "\n")
        return reports


class Child:
    """The process of one arm."""

    def __init__(self, spec: EngineSpec, arm: ArmPlan, of: Profile) -> None:
        self._folder = spec.scratch
        self._started = False
        environment = {**arm.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # all of the engine in one thread
        log = of.log(arm.name)
        self.process = EngineProcess(arm.name, spec, environment, of.requests, log, command=of.child_command)
        self._log = log.open(errors="replace")

    def wait_started(self, watch: Callable[[], None]) -> None:
        """The engine is up."""
        self.process.wait("started", watch)
        self._started = True

    def measure(self, watch: Callable[[], None]) -> None:
        """Its turn."""
        if self._started:
            self.process.measure(0, watch)

    def echo(self) -> None:
        """Show what the process has to say."""
        for line in self._log:
            if line.startswith(MARK):
                say(line.removeprefix(MARK).rstrip())

    def report(self) -> Report | None:
        """What it found so far."""
        path = self._folder / REPORT
        return Report.model_validate_json(path.read_text()) if path.exists() else None


def config(options: argparse.Namespace) -> PreftConfig:
    """Of the same engines and requests as `preft bench` would have."""
    bench = BenchConfig(
        arms=options.arms,
        num_adapters=options.adapters,
        num_requests=options.requests,
        prompt_len=options.prompt,
        output_len=options.output,
        max_num_seqs=options.seqs,
        gpu_slots=options.slots,
        rank=options.rank,
        dtype=options.dtype,
        lora_graphs="specialised",
        repeats=PASSES,
    )
    return PreftConfig(model=ModelConfig(base=options.model), bench=bench)


if __name__ == "__main__":
    main()
