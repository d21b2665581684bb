"""The most memory that training took."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def reset_peak_memory(device: str) -> None:
    """What was on the GPU before, such as other runs in this process, does not count."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> int:
    """Bytes: on a GPU of tensors on it since `reset_peak_memory`, on a CPU of this process in RAM since it began."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    # getrusage's figure is inherited from the parent process, this one is not; some sandboxes leave it out.
    lines = STATUS.read_text().splitlines() if STATUS.is_file() else []
    found = next((line for line in lines if line.startswith("VmHWM:")), None)
    if found:
        return int(found.split()[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
