"""The most memory that training took."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_memory(device: str) -> int:
    """Bytes: on a GPU of tensors on it, on a CPU of this process in RAM; both since the process began."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.is_file():
        # getrusage's figure is inherited from the parent process, this one is not.
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
