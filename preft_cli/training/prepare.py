"""Everything that can be wrong before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preft_cli.adapters.base import BaseFacts
from preft_cli.config.schema import AdapterConfig, PreftConfig
from preft_cli.console import say
from preft_cli.data.load import data_files, load_tokens, tokenise_files
from preft_cli.data.template import ChatTemplate
from preft_cli.data.tokenise import TokenisedRows
from preft_cli.data.turn import Row
from preft_cli.methods import PARTS, parts_of
from preft_cli.models import BaseModel, resolve
from preft_cli.training.apart import Apart, keep_apart
from preft_cli.training.arrange import pack_all
from preft_cli.training.boards import present_boards
from preft_cli.training.device import Precision, check_devices, choose_precision
from preft_cli.training.quantise import check_quantised


@dataclass(frozen=True)
class Prepared:
    """A run that has passed all checks."""

    base: BaseModel
    tokenizer: Any
    template: ChatTemplate
    train: TokenisedRows
    held_out: TokenisedRows | None
    validation: TokenisedRows | None
    facts: BaseFacts
    limit: int
    """Longest row, in tokens."""
    targets: dict[str, list[str]]
    """By part of the method, the modules to adapt."""
    precision: Precision
    apart: Apart
    """How rows share sequences."""
    sequences: list[list[Row]] | None
    """With packing, the training rows in each."""
    boards: list[str]
    """What of `train.report_to` is there."""


def prepare(config: PreftConfig, root: Path) -> Prepared:
    """Read and tokenise the data and check every setting against the base model; no weights are loaded.

    Raises:
        UserError: anything that would fail later.
    """
    check_devices(config.train)
    check_quantised(config.train.quantize_base)
    present = present_boards(config)
    turns = {setting: file.read() for setting, file in data_files(config, root).items()}
    base = resolve(config.model.base, root)
    tokens = load_tokens(config, root, base)
    precision = choose_precision(config.train.dtype)
    facts = BaseFacts.of(base, config.model.residual_stream)
    targets = _targets(config, facts)
    if idle := idle_settings(config.adapter):
        say(f"{', '.join(idle)}: nothing that method {config.adapter.method} has reads this")
    apart = keep_apart(config.train, base.hf_config, base.name, tokens.limit)
    rows = tokenise_files(turns, tokens)
    for setting, found in rows.items():
        for remark in found.remarks(setting, tokens.limit):
            say(remark)
    return Prepared(
        base,
        tokens.tokenizer,
        tokens.template,
        train=rows["train.file"],
        held_out=rows.get("eval.file"),
        validation=rows.get("train.validation_file"),
        facts=facts,
        limit=tokens.limit,
        targets=targets,
        precision=precision,
        apart=apart,
        sequences=_sequences(rows["train.file"].rows, config, apart),
        boards=present,
    )


def _sequences(rows: list[Row], config: PreftConfig, apart: Apart) -> list[list[Row]] | None:
    if not apart.packing:
        return None
    sequences = pack_all(rows, config.train.max_length, share=apart.share_prompts, seed=config.project.seed)
    say(f"train.packing: {len(rows)} rows in {len(sequences)} sequences of up to {config.train.max_length} tokens")
    return sequences


def prepare_again(prepared: Prepared, config: PreftConfig) -> Prepared:
    """The same rows and base model for `config`, which differs in nothing that they depend on.

    Raises:
        UserError: settings that do not fit the base model or this machine.
    """
    check_devices(config.train)
    check_quantised(config.train.quantize_base)
    apart = keep_apart(config.train, prepared.base.hf_config, prepared.base.name, prepared.limit)
    return replace(
        prepared,
        targets=_targets(config, prepared.facts),
        precision=choose_precision(config.train.dtype),
        apart=apart,
        sequences=_sequences(prepared.train.rows, config, apart),
        boards=present_boards(config),
    )


def _targets(config: PreftConfig, facts: BaseFacts) -> dict[str, list[str]]:
    return {part.name: part.targets(config.adapter, facts) for part in parts_of(config.adapter.method)}


def idle_settings(config: AdapterConfig) -> list[str]:
    """What is set and belongs to a part that the method has not."""
    used = parts_of(config.method)
    idle = {key for part in PARTS.values() if part not in used for key in part.own_keys}
    return [f"adapter.{key}" for key in sorted(idle & config.model_fields_set)]
