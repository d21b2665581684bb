"""The trainers of `bench_training` can be built and run, change weights, and put rows into steps as they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
    before = {key: p.detach().clone() for key, p in arm.trainer.model.named_parameters() if p.requires_grad}
    for _ in range(2):
        assert arm.epoch() > 0
    assert len(arm.cpu_seconds) == 2
    changed = [
        key for key, p in arm.trainer.model.named_parameters() if key in before and not torch.equal(p, before[key])
    ]
    assert changed
    assert all("lora" in key for key in changed)
    assert (arm.clock.steps < 4) == (name == "preft-packing"), "eight rows in batches of two"
