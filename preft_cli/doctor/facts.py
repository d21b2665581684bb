"""What this machine is and has. Facts only: `checks` judges them, and tests replace them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROBE_TIMEOUT_S = 120
_TORCH_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


@dataclass(frozen=True)
class Torch:
    """The installed torch. `cuda` is None for a CPU build; `error` is set if it cannot be imported."""

    version: str
    cuda: str | None = None
    gpus: tuple[str, ...] = ()
    error: str | None = None


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch() -> Torch | None:
    """Torch as a process of its own sees it, so that a build that crashes cannot take the doctor with it."""
    version = version_of("torch")
    if version is None:
        return None
    printed, error = _python(_TORCH_PROBE)
    if error is not None:
        return Torch(version, error=error)
    found = json.loads(printed.splitlines()[-1])
    return Torch(found["version"], found["cuda"], tuple(found["gpus"]))


def import_error(module: str) -> str | None:
    """Why `import module` fails in a fresh process; None if it does not."""
    return _python(f"import {module}")[1]


def _python(code: str) -> tuple[str, str | None]:
    """Stdout of a fresh Python, and the last line of its complaint if it failed."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {PROBE_TIMEOUT_S} s"
    if done.returncode == 0:
        return done.stdout, None
    lines = done.stderr.strip().splitlines()
    return done.stdout, lines[-1] if lines else f"exit code {done.returncode}"


def plugin_entry() -> str | None:
    """What the entry point that vLLM looks for points to; None if it is not installed."""
    entries = importlib.metadata.entry_points(group="vllm.general_plugins", name="preft")
    return next((entry.value for entry in entries), None)


def has_module(name: str) -> bool:
    """Whether a module can be found; it is not imported (its parent packages are)."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def nvidia_gpu() -> bool:
    """Whether the machine has an NVIDIA driver, whatever torch makes of it."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def available_memory() -> int | None:
    """Bytes that a new process may take: what the machine has left, or the container if that is less."""
    limits = [amount for amount in (_machine_memory(), _container_memory()) if amount is not None]
    return min(limits, default=None)


def _machine_memory() -> int | None:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in lines:
            return int(lines["MemAvailable"].split()[0]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _container_memory() -> int | None:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(int(limit) - used, 0) if limit.isdigit() else None


def free_disk(folder: Path) -> int:
    """Free bytes where `folder` lies or will lie."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
