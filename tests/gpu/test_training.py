"""Training on GPUs: two of them give what one gives with the batch of both, and a quantised base (run by hand: CI has no GPU).

python -m pytest tests/gpu/test_training.py        on a machine with two GPUs; with bitsandbytes for the last test
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from preft_cli.adapters.folder import load_trained
from preft_cli.config.schema import PreftConfig
from preft_cli.training.run import train
from tests.unit.test_training_run import ROWS, config, logged
from tests.unit.tiny import save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
STEPS = {"max_steps": 6, "eval_every": 2, "save_every": 3}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpus")
    save_tiny(root / "base")
    for name in ("train", "heldout"):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return root


def of(root: Path, name: str, **options: Any) -> PreftConfig:
    adapter = {"dropout": 0.0, "method": "lorap+direftp"}
    return config(root / "base", adapter=adapter, train=STEPS | {"output_dir": name} | options)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one(root: Path, parallel: str) -> None:
    one = train(of(root, f"one-{parallel}", batch_size=4), root)
    halves = {"batch_size": 2, "num_processes": 2, "parallel": parallel}
    two = train(of(root, parallel, **halves), root)
    for single, double in zip(logged(root / f"one-{parallel}"), logged(root / parallel), strict=True):
        assert double == pytest.approx(single, rel=1e-4, abs=1e-5)
    assert one.held_out is not None
    assert two.held_out is not None
    assert two.held_out.adapter == pytest.approx(one.held_out.adapter, rel=1e-4)
    assert (two.device, two.num_processes) == ("cuda", 2)
    # On from the last checkpoint, to twice the length.
    more = train(of(root, parallel, **halves, max_steps=12), root, resume=True)
    assert more.steps == 12
    assert load_trained(root / parallel / "adapter").digest() == more.digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_gpu(root: Path, dtype: str) -> None:
    result = train(of(root, dtype, dtype=dtype), root)
    assert result.held_out is not None
    assert result.held_out.adapter < result.held_out.base
    assert (result.device, result.dtype) == ("cuda", dtype)
    assert 0 < (result.peak_memory or 0) < 1 << 30
    assert load_trained(root / dtype / "adapter").dtype == "float32"


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_quantised_base(root: Path, bits: str) -> None:
    pytest.importorskip("bitsandbytes")
    result = train(of(root, bits, quantize_base=bits, dtype="bfloat16", gradient_checkpointing=True), root)
    assert result.held_out is not None
    assert result.held_out.adapter < result.held_out.base
    assert load_trained(root / bits / "adapter").meta["quantize_base"] == bits
