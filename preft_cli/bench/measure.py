"""Run the blocks of a plan: start engines, let them take turns, keep what was measured."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from preft_cli.bench.parts import Parts
from preft_cli.bench.process import EngineProcess
from preft_cli.bench.results import BlockRun, EngineRun, Repetition
from preft_cli.bench.schedule import Block
from preft_cli.console import progress


class Engines:
    """The engines that are alive; leaving the context ends them."""

    def __init__(self, start: Callable[[str], EngineProcess], at_once: int = 1) -> None:
        """`start` makes the process of an engine by name; so many start side by side."""
        self._start, self._at_once = start, at_once
        self._alive: dict[str, EngineProcess] = {}

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(list(self._alive), idle=kind is None)

    def __getitem__(self, name: str) -> EngineProcess:
        return self._alive[name]

    def keep(self, names: list[str]) -> dict[str, EngineRun]:
        """End all engines but these, start those that are missing, wait until all are warm.

        Returns:
            What there is to say of each so far.

        Raises:
            UserError: an engine did not come up.
        """
        self._end([name for name in self._alive if name not in names])
        missing = [name for name in names if name not in self._alive]
        runs = {}
        if not missing:
            return {name: self._run(name) for name in names}
        with progress(f"bench: starting {', '.join(missing)}", total=len(missing), unit="engines") as bar:
            for number, name in enumerate(missing):
                for starting in missing[: number + self._at_once]:
                    if starting not in self._alive:
                        self._alive[starting] = self._start(starting)
                runs[name] = self._welcome(name)
                bar.advance()
        return {name: runs.get(name) or self._run(name) for name in names}

    def _end(self, names: list[str], *, idle: bool = True) -> None:
        """End these side by side: each takes some seconds to take its engine down."""
        ending = [self._alive.pop(name) for name in names]
        with ThreadPoolExecutor(max(1, len(ending))) as pool:
            list(pool.map(lambda process: process.stop(idle=idle), ending))

    def _welcome(self, name: str) -> EngineRun:
        process = self._alive[name]
        started = process.wait("started").started
        warm = process.wait("warm")
        assert started is not None
        assert warm.repetition is not None
        run = self._run(name)
        return run.model_copy(
            update={"started": [started], "failures": warm.repetition.failures, "failed": warm.failed}
        )

    def _run(self, name: str) -> EngineRun:
        log = self._alive[name].log.name
        return EngineRun(started=[], repetitions=[], again=[], failures=0, failed=[], log=log)


def measure_blocks(blocks: list[Block], engines: Engines, parts: Parts) -> list[BlockRun]:
    """Run all blocks in turn; what was measured before is taken from `parts`, and what is measured is kept there.

    Raises:
        UserError: an engine failed. What was measured before stays in `parts`.
    """
    runs = []
    for index, block in enumerate(blocks):
        run = parts.read(index)
        if run is None:
            run = measure_block(index, block, engines)
            parts.keep(index, run)
        runs.append(run)
    return runs


def measure_block(index: int, block: Block, engines: Engines) -> BlockRun:
    """Let the engines take turns, the last one of a repetition being the first of the next: a steady drift cancels out."""
    runs = engines.keep(block.engines)
    turns = [(number, False) for number in block.repetitions] + [(block.repetitions[0], True)] * block.again
    order = []
    with progress(f"bench {', '.join(block.engines)}", len(turns) * len(block.engines), "passes") as bar:
        for turn, (number, again) in enumerate(turns):
            for name in block.engines if turn % 2 == 0 else reversed(block.engines):
                event = engines[name].measure(number)
                assert event.repetition is not None
                done = event.repetition.model_copy(update={"block": index})
                bar.advance(note=f"{name} {done.requests_per_second:.2f} req/s")
                runs[name] = add(runs[name], done, event.failed, again)
                order.append(name)
    return BlockRun(order=order, engines=runs)


def add(run: EngineRun, done: Repetition, failed: list[str], again: bool) -> EngineRun:
    """The run with one more repetition."""
    field = "again" if again else "repetitions"
    return run.model_copy(
        update={
            field: [*getattr(run, field), done],
            "failures": run.failures + done.failures,
            "failed": [*run.failed, *failed],
        }
    )
