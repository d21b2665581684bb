"""The base model into memory, and the adapter out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine_patch.adapter import Adapter
from preft_cli.adapters.folder import save_trained
from preft_cli.config.schema import PreftConfig
from preft_cli.methods import parts_of
from preft_cli.methods.adapted import AdaptedModel
from preft_cli.models.quiet import quiet_transformers
from preft_cli.training import processes
from preft_cli.training.foundation import Foundation
from preft_cli.training.quantise import quantised


def load_base(prepared: Foundation, device: torch.device, bits: str | None = None) -> Any:
    """The base model on `device` in the compute type: the weights that a server of that type computes with.

    With `bits` its linear layers are quantised.
    """
    # On a CPU nothing has to be placed; quantised weights are made where they stay.
    place = {"device_map": {"": str(device)}} if bits or device.type != "cpu" else {}
    with quiet_transformers():
        base = AutoModelForCausalLM.from_pretrained(
            prepared.base.path,
            dtype=prepared.precision.dtype,
            # Takes a mask of true and false as it is; the slow one would add it to the scores.
            **({"attn_implementation": "sdpa"} if prepared.apart.needs_mask else {}),
            **place,
            **quantised(bits, prepared.precision),
        )
    if bits:
        # DiReFT is no adapter that Transformers knows of, and it refuses to train a quantised model without one.
        base._hf_peft_config_loaded = True
    return base


def save_adapter(
    folder: Path, config: PreftConfig, prepared: Foundation, adapted: AdaptedModel, **about: Any
) -> Adapter:
    """Write the adapter as it is now, with where it comes from and what is told `about` it."""
    settings = {
        part.name: part.settings(config.adapter, prepared.targets[part.name])
        for part in parts_of(config.adapter.method)
    }
    meta = _meta(config, prepared) | about
    adapter = Adapter(config.adapter.method, prepared.base.fingerprint, adapted.pairs(), meta)
    if processes.is_main():
        save_trained(folder, adapter, settings, name=config.adapter.name)
    return adapter


def _meta(config: PreftConfig, prepared: Foundation) -> dict[str, Any]:
    """What the server must do alike, and provenance."""
    return {
        "base_model": prepared.base.name,
        "chat_template_digest": prepared.template.digest,
        "chat_template_kwargs": {},
        "bos_policy": {"chat": "written by the chat template", "text": "added by the tokenizer"},
        "bos_token": prepared.tokenizer.bos_token,
        "end_of_turn_id": prepared.template.end_of_turn_id,
        "seed": config.project.seed,
        "dtype": prepared.precision.name,
    } | _quantised_meta(config.train.quantize_base)


def _quantised_meta(bits: str | None) -> dict[str, Any]:
    if bits is None:
        return {}
    return {
        "quantize_base": bits,
        "note": f"trained on a {bits.removesuffix('bit')}-bit base; serve on the unquantised base",
    }
