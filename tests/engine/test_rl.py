"""`preft train` with `train.task: grpo` on the real small model, its engine in the same process: from the template to a result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from preft_cli.adapters.folder import load_trained
from preft_cli.rl.result import RlResult

pytestmark = pytest.mark.engine

SMALL = (
    "train.max_steps=3", "train.batch_size=16", "train.gradient_accumulation_steps=1", "train.dtype=float32",
    "train.grpo.train_problems=40", "train.grpo.eval_problems=12", "train.grpo.max_completion_length=16",
    "train.eval_every=2", "train.save_every=2", "train.learning_rate=3e-3", "train.warmup_ratio=0",
)  # fmt: skip


def preft(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "preft_cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize(("method", "temperature"), [("lorap", 0.6), ("lora", 1.0)])
def test_a_run_from_start_to_end(tmp_path: Path, method: str, temperature: float) -> None:
    """Trainer and engine compute the same log-probabilities though the weights change greatly from step to step.

    The engine's prefix cache is warm: problems come again after a sync, in evaluations and, with 4 problems, in steps.
    """
    assert preft(tmp_path, "init", ".", "--template", "rl").returncode == 0
    sets = [
        word
        for setting in (*SMALL, f"adapter.method={method}", f"train.grpo.temperature={temperature}")
        for word in ("--set", setting)
    ]
    ended = preft(tmp_path, "train", "--json", *sets)
    assert ended.returncode == 0, ended.stderr
    result = RlResult.model_validate_json(ended.stdout)
    folder = tmp_path / "runs" / "rl"
    assert load_trained(folder / "adapter").digest() == result.digest
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["logprob_gap_max"] < 1e-3, "float32 on both sides"
        assert row["ratio_mean"] == pytest.approx(1, abs=1e-3)
        assert row["sync_bytes"] > 0
    assert any(row["grad_norm"] > 0 for row in steps)
    assert result.held_out is not None
    assert result.held_out.rows == 12
    assert result.summary.shares is not None
    assert result.summary.shares.generation + result.summary.shares.training > 0.9
