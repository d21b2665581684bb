"""What every kind of training stands on: the base model, its tokens, and how this machine computes with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft_cli.adapters.base import BaseFacts
from preft_cli.config.schema import AdapterConfig, PreftConfig
from preft_cli.console import say
from preft_cli.data.load import Tokens, load_tokens
from preft_cli.data.template import ChatTemplate
from preft_cli.methods import PARTS, parts_of
from preft_cli.models import BaseModel, resolve
from preft_cli.training.apart import Apart, keep_apart
from preft_cli.training.boards import present_boards
from preft_cli.training.device import Precision, check_devices, choose_precision
from preft_cli.training.quantise import check_quantised


@dataclass(frozen=True)
class Foundation:
    """Of a run that has passed the checks of its settings."""

    base: BaseModel
    tokenizer: Any
    template: ChatTemplate
    facts: BaseFacts
    limit: int
    """Longest row, in tokens."""
    targets: dict[str, list[str]]
    """By part of the method, the modules to adapt."""
    precision: Precision
    apart: Apart
    """How rows share sequences."""
    boards: list[str]
    """What of `train.report_to` is there."""


def check_machine(config: PreftConfig) -> None:
    """Refuse what this machine cannot do.

    Raises:
        UserError: as `check_devices` and `check_quantised` do.
    """
    check_devices(config.train)
    check_quantised(config.train.quantize_base)


def lay_foundation(config: PreftConfig, root: Path) -> tuple[Foundation, Tokens]:
    """Check every setting against the base model; no weights are loaded.

    Raises:
        UserError: anything that would fail later.
    """
    base = resolve(config.model.base, root)
    tokens = load_tokens(config, root, base)
    facts = BaseFacts.of(base, config.model.residual_stream)
    settings = settings_of(config, base, facts, tokens.limit)
    if idle := idle_settings(config.adapter):
        say(f"{', '.join(idle)}: nothing that method {config.adapter.method} has reads this")
    return Foundation(base, tokens.tokenizer, tokens.template, facts, tokens.limit, **settings), tokens


def settings_of(config: PreftConfig, base: BaseModel, facts: BaseFacts, limit: int) -> dict[str, Any]:
    """The fields of `Foundation` that depend on settings and not on data or weights.

    Raises:
        UserError: settings that do not fit the base model or this machine.
    """
    return {
        "targets": {part.name: part.targets(config.adapter, facts) for part in parts_of(config.adapter.method)},
        "precision": choose_precision(config.train.dtype),
        "apart": keep_apart(config.train, base.hf_config, base.name, limit),
        "boards": present_boards(config),
    }


def idle_settings(config: AdapterConfig) -> list[str]:
    """What is set and belongs to a part that the method has not."""
    used = parts_of(config.method)
    idle = {key for part in PARTS.values() if part not in used for key in part.own_keys}
    return [f"adapter.{key}" for key in sorted(idle & config.model_fields_set)]
