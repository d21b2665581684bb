"""What an unfinished benchmark has measured already: one file a block, in a folder beside the result."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from preft_cli.bench.fit import FittedPlan
from preft_cli.bench.results import BlockRun, write_json
from preft_cli.bench.workload import Workload
from preft_cli.errors import UserError


class Parts:
    """The blocks of one plan that are done."""

    def __init__(self, out: Path, fitted: FittedPlan, workload: Workload, *, resume: bool) -> None:
        """Go on from what lies beside `out` (`resume`), or remove it.

        Raises:
            UserError: `resume`, and what lies there is of another plan.
        """
        self._folder = out.with_name(f"{out.stem}.parts")
        self._stamp = self._folder / "plan.sha256"
        self._digest = digest(fitted, workload)
        if not resume:
            self.remove()
        elif self._stamp.is_file() and self._stamp.read_text() != self._digest:
            raise UserError(
                f"--resume: {self._folder} was measured with other settings, or with other engines side by side (which free"
                " memory decides); go on with those, or leave out --resume to start again",
                exit_code=2,
            )

    def read(self, index: int) -> BlockRun | None:
        """Block `index`; None if it was not measured, or its file is damaged."""
        with suppress(OSError, ValidationError):
            return BlockRun.model_validate_json(self._file(index).read_bytes())
        return None

    def keep(self, index: int, run: BlockRun) -> None:
        """Write block `index`."""
        self._folder.mkdir(exist_ok=True)
        self._stamp.write_text(self._digest)
        write_json(run, self._file(index))

    def remove(self) -> None:
        """The benchmark is done, or begins anew."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, index: int) -> Path:
        return self._folder / f"block-{index:03d}.json"


def digest(fitted: FittedPlan, workload: Workload) -> str:
    """Of all that two runs must share to be one: the plan, the requests, who takes turns with whom.

    Sizes that follow from free memory are left out; it is never quite the same twice.
    """
    plan = fitted.plan.model_copy(update={"arms": [], "notes": []})
    arms = [arm.model_copy(update={"engine_args": {}}).model_dump_json() for arm in fitted.plan.arms]
    blocks = [block.model_dump_json() for block in fitted.blocks]
    everything = [plan.model_dump_json(), *arms, *blocks, workload.digest()]
    return hashlib.sha256("\n".join(everything).encode()).hexdigest()
