"""On a GPU: 5,000 mixed requests over 256 adapters, all checks of `tests.loud`. What a run gave is in `results/`."""

from __future__ import annotations

import pytest
import torch

from tests.loud import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and vLLM's CUDA build"),
]


def test_5000_mixed_requests_end_with_no_error_and_no_wrong_adapter() -> None:
    status, report = Run("--requests", 5000, "--adapters", 256, "--dtype", "bfloat16").end()
    assert (status, report["misses"], report["requests"]) == (0, 0, 5000), report["said"]
    (engine,) = report["engines"]
    assert "vllm.v1.worker.gpu.model_runner.GPUModelRunner" in engine["processes"]
    assert engine["async_scheduling"]
    assert engine["cudagraph_mode"] != "NONE"
    for what, least in {"aborted": 50, "preemptions": 10, "evictions": 1000, "mixed_steps": 500}.items():
        assert report[what] >= least, what


def test_a_swap_of_adapters_is_noticed() -> None:
    status, report = Run("--requests", 500, "--adapters", 64, "--mutation", "swap").end()
    assert status == 1
    assert report["wrong_first_tokens"] > 0, report["said"]
