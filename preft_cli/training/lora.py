"""PEFT's LoRA: which layers, onto the base model, and out of it again."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from preft_cli.config.schema import AdapterConfig
from preft_cli.errors import UserError

ADAPTER_NAME = "default"
"""PEFT's name for the only adapter of a model."""


def target_modules(config: AdapterConfig, linear: Iterable[str]) -> list[str]:
    """Full names of the layers to adapt. `q_proj` names it in every layer; `layers.0.self_attn.q_proj` in one.

    Raises:
        UserError: for a name that matches no linear layer, with the nearest one.
    """
    names = list(linear)
    if config.target_modules == "all-linear":
        return names
    wanted = {target: [name for name in names if f".{name}".endswith(f".{target}")] for target in config.target_modules}
    known = sorted({name.rpartition(".")[2] for name in names})
    for target, matches in wanted.items():
        if not matches:
            near = get_close_matches(target, known, n=1)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise UserError(
                f"adapter.target_modules: {target!r} matches no linear layer of the base model; "
                f"known: {', '.join(known)}, or all-linear.{meant}",
                exit_code=2,
            )
    if not wanted:
        raise UserError("adapter.target_modules: the list is empty; name layers, or use all-linear", exit_code=2)
    chosen = {name for matches in wanted.values() for name in matches}
    return [name for name in names if name in chosen]


def add_lora(model: Any, config: AdapterConfig, targets: list[str]) -> Any:
    """The PEFT model: `model` frozen, with a trainable float32 adapter that starts as a no-op (B = 0)."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type, unused-ignore]
            lora_dropout=config.dropout,
            use_rslora=config.use_rslora,
            target_modules=targets,
            bias="none",
            task_type="CAUSAL_LM",
        ),
        autocast_adapter_dtype=True,
    )


def extract_adapter(model: Any, method: str, base: BaseFingerprint, meta: dict[str, Any]) -> Adapter:
    """A copy of the trained weights, independent of `model`."""
    pairs = {
        name: LowRankPair(
            a=layer.lora_A[ADAPTER_NAME].weight.detach().cpu().clone(),
            b=layer.lora_B[ADAPTER_NAME].weight.detach().cpu().clone(),
            scaling=float(layer.scaling[ADAPTER_NAME]),
        )
        for name, layer in model.get_base_model().named_modules()
        if hasattr(layer, "lora_A") and ADAPTER_NAME in layer.lora_A
    }
    return Adapter(method=method, base=base, pairs=pairs, meta=meta)


def restore_adapter(model: Any, adapter: Adapter) -> None:
    """Put the weights of `extract_adapter` back into a model of the same config."""
    base = model.get_base_model()
    for name, pair in adapter.pairs.items():
        layer = base.get_submodule(name)
        layer.lora_A[ADAPTER_NAME].weight.data.copy_(pair.a)
        layer.lora_B[ADAPTER_NAME].weight.data.copy_(pair.b)
