"""On a GPU (Model Runner V2, asynchronous scheduling, CUDA graphs): the schedules of `tests.schedules` in half precision.

The kernels alone are held to float32 in `test_lora_kernels.py`. What a run gave is in
`results/`, by the commands in `results/README.md`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and vLLM's CUDA build"),
]


def schedules(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.schedules", *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=800)


@pytest.mark.parametrize(
    ("dtype", "engine", "processes"), [("float16", 2, "0"), ("bfloat16", 3, "1")], ids=["float16", "bfloat16"]
)
def test_answers_equal_the_reference(dtype: str, engine: int, processes: str) -> None:
    """In this process with preemptions and chunks, and as a server runs it, with the engine core in its own."""
    ended = schedules(
        *("--model", "smollm2-135m", "--schedules", 40, "--engine", engine, "--dtype", dtype),
        VLLM_ENABLE_V1_MULTIPROCESSING=processes,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "vllm.v1.worker.gpu.model_runner.GPUModelRunner" in ended.stdout


@pytest.mark.parametrize(
    ("engine", "more"), [(1, []), (4, []), (2, ["--eager"])], ids=["caching-off", "priorities", "graphs-off"]
)
def test_answers_of_other_settings_equal_the_reference(engine: int, more: list[str]) -> None:
    ended = schedules(*("--schedules", 30, "--engine", engine, "--dtype", "float16", *more))
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_answers_of_two_gpus_equal_the_reference() -> None:
    ended = schedules(*("--schedules", 60, "--engine", 2, "--dtype", "float16", "--tensor-parallel", 2))
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_a_planted_fault_is_found() -> None:
    ended = schedules(
        *("--model", "smollm2-135m", "--schedules", 10, "--engine", 3, "--dtype", "float16", "--mutation", "off-by-one")
    )
    assert ended.returncode == 1
    assert "to a mask that is off by one" in ended.stderr
