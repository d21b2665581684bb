"""What an unfinished benchmark has measured already, in a folder beside the result: the plan, and a file for each block."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from preft_cli.bench import machine
from preft_cli.bench.fit import FittedPlan
from preft_cli.bench.plan import BenchPlan
from preft_cli.bench.results import BlockRun, Record, write_json
from preft_cli.bench.workload import Workload
from preft_cli.console import say
from preft_cli.errors import UserError

PLAN = "plan.json"


class KeptPlan(Record):
    """What the measurements in the folder were made with."""

    digest: str
    fitted: FittedPlan
    """With its sizes: free memory is never quite the same twice, and a run goes on with those that it began with."""


class Parts:
    """The measurements of one plan."""

    def __init__(self, out: Path, plan: BenchPlan, workload: Workload, *, resume: bool) -> None:
        """Go on from what lies beside `out` (`resume`), or remove it.

        Raises:
            UserError: `resume`, and what lies there is of another plan, another machine or another preft.
        """
        self._folder = out.with_name(f"{out.stem}.parts")
        self._digest = digest(plan, workload)
        if not resume:
            if self.measured:
                say(f"note: starting again; --resume would have kept what {self._folder} held")
            self.remove()
        self.fitted = self._read_plan() if resume else None
        """The plan that the run began with; None if nothing was measured yet, and to be set before something is."""

    def _read_plan(self) -> FittedPlan | None:
        try:
            kept = KeptPlan.model_validate_json((self._folder / PLAN).read_bytes())
        except (OSError, ValidationError):
            self.remove()  # measurements without their plan are of no use
            return None
        if kept.digest != self._digest:
            raise UserError(
                f"--resume: {self._folder} was measured with other settings, versions, hardware or another commit; go on"
                " with those, or leave out --resume to start again",
                exit_code=2,
            )
        return kept.fitted

    def read(self, index: int) -> BlockRun:
        """What was measured of block `index` so far."""
        with suppress(OSError, ValidationError):
            return BlockRun.model_validate_json(self._file(index).read_bytes())
        return BlockRun(order=[], engines={})

    def keep(self, index: int, run: BlockRun) -> None:
        """Write what was measured of block `index` so far, after the plan."""
        assert self.fitted is not None
        plan = self._folder / PLAN
        if not self.measured:
            self._folder.mkdir(exist_ok=True)
            write_json(KeptPlan(digest=self._digest, fitted=self.fitted), plan)
        write_json(run, self._file(index))

    @property
    def measured(self) -> bool:
        """Whether something lies there."""
        return (self._folder / PLAN).exists()

    def remove(self) -> None:
        """The benchmark is done, or begins anew. What is not ours in the folder stays."""
        if self.measured:
            for file in (*self._folder.glob("block-*.json"), self._folder / PLAN):
                file.unlink()
            with suppress(OSError):
                self._folder.rmdir()

    def _file(self, index: int) -> Path:
        return self._folder / f"block-{index:03d}.json"


def digest(plan: BenchPlan, workload: Workload) -> str:
    """Of all that two runs must share to be one: plan, requests, versions, hardware, commit."""
    about = [str(machine.versions()), machine.hardware().model_dump_json(), str(machine.commit())]
    return hashlib.sha256("\n".join([plan.model_dump_json(), workload.digest(), *about]).encode()).hexdigest()
