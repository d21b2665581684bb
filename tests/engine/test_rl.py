"""The RL example as it stands in the repository, on the real small model, with fewer steps: from problems to a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from preft_cli.adapters.folder import load_trained
from preft_cli.rl.result import RlResult
from preft_cli.training.sweep.result import SweepResult

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
# The learning rates change the weights greatly from step to step.
SMALL = (
    "train.max_steps=2", "train.batch_size=16", "train.dtype=float32", "train.warmup_ratio=0", "train.eval_every=2",
    "serve.max_num_batched_tokens=256",
    "train.grpo.train_problems=40", "train.grpo.eval_problems=8", "train.grpo.max_completion_length=12",
)  # fmt: skip


def test_the_example_from_start_to_end(tmp_path: Path) -> None:
    """Trainer and engine compute the same log-probabilities at both temperatures.

    The engine's prefix cache is warm: all prompts begin with the same worked examples, and held-out ones come after each step.
    """
    sets = [word for setting in (*SMALL, f"train.output_dir={tmp_path}/runs") for word in ("--set", setting)]
    ended = subprocess.run(
        ["bash", "examples/rl/reasoning.sh", "letter_counting", *sets, "--sweep", "train.grpo.temperature=0.6,1.0"],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "METHODS": "lorap:1e-2",
            "SEEDS": "0",
            "OUT": str(tmp_path / "letters.json"),
        },
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stderr
    assert "held-out accuracy" in ended.stdout
    swept = SweepResult.model_validate_json((tmp_path / "letters.json").read_text())
    assert len(swept.cells) == 2
    assert not swept.failed
    assert (tmp_path / "letters.png").read_bytes().startswith(b"\x89PNG")
    folders = [tmp_path / "runs" / cell.name for cell in swept.cells]
    for folder in folders:
        result = RlResult.model_validate_json((folder / "result.json").read_text())
        assert load_trained(folder / "adapter").digest() == result.digest
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if row["kind"] == "train"]
        assert [row["step"] for row in steps] == [1, 2]
        for row in steps:
            assert row["logprob_gap_max"] < 1e-3, "float32 on both sides"
            assert row["ratio_mean"] == pytest.approx(1, abs=1e-3)
            assert row["sync_bytes"] > 0
        assert any(row["grad_norm"] > 0 for row in steps)
        assert result.held_out is not None
        assert result.held_out.rows == 8
        assert result.summary.shares is not None
        assert result.summary.shares.generation + result.summary.shares.training > 0.9
