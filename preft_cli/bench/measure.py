"""Run the blocks of a plan: start engines, let them take turns, keep what was measured."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from preft_cli.bench.comparable import check_settings
from preft_cli.bench.parts import Parts
from preft_cli.bench.process import EngineProcess
from preft_cli.bench.results import BlockRun, EngineRun, Repetition, Started
from preft_cli.bench.schedule import Block
from preft_cli.console import progress


class Engines:
    """The engines that are alive; leaving the context ends them."""

    def __init__(self, start: Callable[[str], EngineProcess], at_once: int = 1) -> None:
        """`start` makes the process of an engine by name; so many start side by side."""
        self._start, self._at_once = start, at_once
        self._alive: dict[str, EngineProcess] = {}
        self._first: tuple[str, Started] | None = None
        """Whose settings and requests all others must share."""

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(list(self._alive), idle=kind is None)

    def require_alive(self) -> None:
        """Raise if one of them has ended: not only when it would be its turn."""
        for process in self._alive.values():
            process.require_alive()

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
        self._first = self._first or (name, started)
        check_settings(*self._first, name, started)
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
        UserError: an engine failed, or engines do not compare. What was measured before stays in `parts`.
    """
    return [measure_block(index, block, engines, parts) for index, block in enumerate(blocks)]


def measure_block(index: int, block: Block, engines: Engines, parts: Parts) -> BlockRun:
    """Let the engines take turns: base, x, y, base, x, y. Each turn is kept as soon as all of them have had it."""
    run = parts.read(index)
    turns = [(number, False) for number in block.repetitions] + [(block.repetitions[0], True)] * block.again
    left = turns[len(run.order) // len(block.engines) :]
    if not left:
        return run
    run = joined(run, engines.keep(block.engines))
    total = len(left) * len(block.engines)
    with progress(f"bench {', '.join(block.engines)}", total, "repetitions") as bar:
        for number, again in left:
            for name in block.engines:
                event = engines[name].measure(number, engines.require_alive)
                assert event.repetition is not None
                done = event.repetition.model_copy(update={"block": index})
                bar.advance(note=f"{name} {done.requests_per_second:.2f} req/s")
                run = add(run, name, done, event.failed, again)
            parts.keep(index, run)
    return run


def joined(run: BlockRun, begun: dict[str, EngineRun]) -> BlockRun:
    """What was measured before an interruption, and the engines that go on with it."""
    engines = {}
    for name, now in begun.items():
        if (before := run.engines.get(name)) is None:
            engines[name] = now
            continue
        sums = {"failures": before.failures + now.failures, "failed": [*before.failed, *now.failed]}
        engines[name] = before.model_copy(update={"started": [*before.started, *now.started], **sums, "log": now.log})
    return run.model_copy(update={"engines": engines})


def add(run: BlockRun, name: str, done: Repetition, failed: list[str], again: bool) -> BlockRun:
    """The block with one more repetition of an engine."""
    engine, field = run.engines[name], "again" if again else "repetitions"
    more = {
        field: [*getattr(engine, field), done],
        "failures": engine.failures + done.failures,
        "failed": [*engine.failed, *failed],
    }
    engines = {**run.engines, name: engine.model_copy(update=more)}
    return BlockRun(order=[*run.order, name], engines=engines)
