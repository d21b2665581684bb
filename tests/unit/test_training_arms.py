"""The trainers of `bench_training` are those of `preft train` and of TRL, and can be built and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.bench_training import Arm
from tests.benchmarks.training_arms import ARMS, Setting
from tests.benchmarks.training_rows import CASES
from tests.unit.tiny import save_tiny


@pytest.mark.parametrize("name", ARMS)
def test_each_arm_trains_an_epoch(name: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    setting = Setting.of(str(base), "float32", batch_size=2, rank=2, limit=32)
    rows = CASES["four completions a prompt"](8, setting.vocabulary, setting.limit)
    arm = Arm(name, setting, rows, tmp_path / name)
    for _ in range(2):
        assert arm.epoch() > 0
    assert len(arm.cpu_seconds) == 2
    assert 0 < arm.clock.steps <= 4
