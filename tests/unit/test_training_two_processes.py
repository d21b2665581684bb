"""Two processes on a CPU, DDP and FSDP, give what one process gives with the batch of both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from preft_cli.adapters.folder import load_trained
from preft_cli.config.schema import PreftConfig
from preft_cli.training import launch
from preft_cli.training.run import train
from tests.unit.test_training_run import ROWS, config, logged
from tests.unit.tiny import save_tiny

BOTH = {"dropout": 0.0, "method": "lorap+direftp", "direft_rank": 2}
STEPS = {"max_steps": 6, "eval_every": 2, "gradient_accumulation_steps": 2}
CLOSE = {"rel": 1e-5, "abs": 1e-5}


def test_two_processes_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Half of the rows are much longer than the others, so that the two processes have different numbers of tokens.

    In the last batch of an epoch (of three steps) there is a row for one process alone. What was stopped goes on in the
    second epoch.
    """
    torch.set_num_threads(1)
    base = save_tiny(tmp_path / "base")
    rows = ROWS[:6] + [
        {"messages": [{"role": "user", "content": f"hello {n}"}, {"role": "assistant", "content": "baz " * (8 + n)}]}
        for n in range(5)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "heldout.jsonl").write_text("\n".join(map(json.dumps, rows[:5])))

    def of(name: str, **options: Any) -> PreftConfig:
        train_section = STEPS | {"output_dir": name, "batch_size": 1, "num_processes": 2} | options
        return config(base, adapter=BOTH, train=train_section, eval={"batch_size": 2})

    one = train(of("one", batch_size=2, num_processes=1), tmp_path)
    jobs = {"ddp": of("ddp"), "fsdp": of("fsdp", parallel="fsdp"), "nan": of("nan")}
    for name, job in jobs.items():
        (tmp_path / f"{name}.job").write_text(job.model_dump_json(exclude_unset=True))
    monkeypatch.setenv("PREFT_TEST_ROOT", str(tmp_path))
    monkeypatch.setattr(launch, "WORKER", [sys.executable, "-m", "tests.unit.two_processes"])
    capfd.readouterr()
    fsdp = train(jobs["fsdp"], tmp_path, resume=True)
    told = capfd.readouterr().err
    assert "resuming from" in told
    assert told.count("training: started, 6 steps") == 4, "the main process alone talks"

    expected = load_trained(tmp_path / "one" / "adapter")
    for name in ("ddp", "fsdp"):
        for single, double in zip(logged(tmp_path / "one"), logged(tmp_path / name), strict=True):
            assert double == pytest.approx(single, **CLOSE), name
        found = load_trained(tmp_path / name / "adapter")
        for module, pair in expected.pairs.items():
            torch.testing.assert_close(found.pairs[module].tensors, pair.tensors, atol=1e-5, rtol=1e-5)
    # Five rows in batches of two, hence one batch more for one process than for the other.
    assert fsdp.held_out is not None
    assert fsdp.held_out.base == pytest.approx(one.held_out.base, **CLOSE)
    assert fsdp.held_out.adapter == pytest.approx(one.held_out.adapter, **CLOSE)
    assert (fsdp.num_processes, fsdp.steps, fsdp.best_step) == (2, 6, one.best_step)
    assert load_trained(tmp_path / "nan" / "adapter").meta["steps"] == 1
