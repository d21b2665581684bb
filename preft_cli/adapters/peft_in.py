"""A PEFT LoRA folder becomes an `Adapter`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine_patch.adapter import Adapter
from engine_patch.errors import PreftError
from preft_cli.adapters.base import BaseFacts, Loaded
from preft_cli.adapters.files import load_plain_bin, load_safetensors
from preft_cli.adapters.layout import (
    PEFT_BIN,
    PEFT_BIN_INDEX,
    PEFT_CONFIG,
    PEFT_INDEX,
    PEFT_WEIGHTS,
    PREFILL_CONFIG,
    PREFILL_WEIGHTS,
)
from preft_cli.adapters.pairs import check_against_base, check_complete, to_pairs
from preft_cli.adapters.peft_config import read_config
from preft_cli.adapters.shards import load_sharded
from preft_cli.adapters.targets import idle_patterns, rank_and_scaling, targeted
from preft_cli.errors import UserError


def load_peft(folder: Path, base: BaseFacts, method: str | None = None) -> Loaded:
    """Read `adapter_config.json` and `adapter_model.safetensors` (or a plain-tensor `.bin`, or shards) of `folder`.

    A PEFT LoRA was trained on all tokens and becomes `lora` unless `method` says otherwise; a folder that `preft
    convert --to peft` wrote for a prefill-only adapter stays what it was. Tensors keep their dtype and bits.

    Raises:
        UserError: anything missing, damaged, for another base model, or beyond plain LoRA.
    """
    prefill_only = (folder / PREFILL_CONFIG).is_file()
    config_path = folder / (PREFILL_CONFIG if prefill_only else PEFT_CONFIG)
    if not config_path.is_file():
        raise UserError(f"{folder}: {PEFT_CONFIG} is missing; save the adapter again with PEFT")
    config = read_config(config_path)
    if (config["peft_type"] == "LORAP") != prefill_only:
        raise UserError(f"{config_path}: peft_type {config['peft_type']!r} does not belong in a file of this name")
    weights, tensors = _weights(folder, PREFILL_WEIGHTS if prefill_only else PEFT_WEIGHTS)
    pairs = to_pairs(tensors, lambda module: rank_and_scaling(config, module), weights)
    check_against_base(pairs, base.shapes, base.name, weights)
    check_complete(pairs, targeted(config, base.shapes), weights)
    own = "lorap" if prefill_only else "lora"
    meta = {"source": "peft", "peft": _recorded(config)}
    try:
        adapter = Adapter(method or own, base.fingerprint, pairs, meta)
    except PreftError as error:
        raise UserError(f"{weights}: {error}") from error
    return Loaded(adapter, _warnings(config, adapter, base))


def _weights(folder: Path, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """The file that was read, for errors, and its tensors; of several forms side by side the safest one counts."""
    forms: list[tuple[str, Callable[[Path], dict[str, torch.Tensor]]]] = [(name, load_safetensors)]
    if name == PEFT_WEIGHTS:
        forms += [
            (PEFT_INDEX, lambda index: load_sharded(index, load_safetensors)),
            (PEFT_BIN, load_plain_bin),
            (PEFT_BIN_INDEX, lambda index: load_sharded(index, load_plain_bin)),
        ]
    for file, load in forms:
        if (folder / file).is_file():
            return folder / file, load(folder / file)
    raise UserError(f"{folder}: {name} is missing; save the adapter again with PEFT")


def _recorded(config: dict[str, Any]) -> dict[str, Any]:
    """The config for the way back; what is not set needs no room in each file's header."""
    return {key: config[key] for key in sorted(config) if config[key] is not None}


def _warnings(config: dict[str, Any], adapter: Adapter, base: BaseFacts) -> list[str]:
    warnings = [f"{pattern} matches no module and does nothing" for pattern in idle_patterns(config, adapter.pairs)]
    recorded = config.get("base_model_name_or_path")
    if recorded and recorded != base.name and Path(recorded).name != Path(base.name).name:
        warnings.append(f"it records the base model {recorded!r} and is converted for {base.name!r}; the shapes agree")
    return warnings
