"""Everything that can be wrong before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preft_cli.adapters.base import BaseFacts
from preft_cli.config.schema import AdapterConfig, PreftConfig
from preft_cli.console import progress, say
from preft_cli.data.read import read_turns
from preft_cli.data.template import ChatTemplate, load_template
from preft_cli.data.tokenise import TokenisedRows, tokenise
from preft_cli.errors import UserError
from preft_cli.methods import PARTS, parts_of
from preft_cli.models import BaseModel, resolve
from preft_cli.training.device import Precision, choose_precision


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
    targets: dict[str, list[str]]
    """By part of the method, the modules to adapt."""
    precision: Precision


def prepare(config: PreftConfig, root: Path) -> Prepared:
    """Read and tokenise the data and check every setting against the base model; no weights are loaded.

    Raises:
        UserError: anything that would fail later.
    """
    turns = {"train.file": read_turns(root / config.train.file)}
    if config.eval.file:
        turns["eval.file"] = read_turns(root / config.eval.file, "eval.file")
    if config.train.validation_file:
        turns["train.validation_file"] = read_turns(root / config.train.validation_file, "train.validation_file")
    base = resolve(config.model.base, root)
    if base.random:
        raise UserError(f"model.base: {base.name} has random weights and no tokenizer: it can be served, not trained")
    precision = choose_precision(config.train.dtype)
    facts = BaseFacts.of(base, config.model.residual_stream)
    targets = _targets(config, facts)
    if idle := idle_settings(config.adapter):
        say(f"{', '.join(idle)}: nothing that method {config.adapter.method} has reads this")
    tokenizer = load_tokenizer(base)
    template = load_template(
        tokenizer, base.path, root / config.model.chat_template if config.model.chat_template else None
    )
    limit = min(
        config.train.max_length, getattr(base.hf_config, "max_position_embeddings", None) or config.train.max_length
    )
    rows = {}
    for setting, found in turns.items():
        with progress(f"tokenising {setting}", total=len(found), unit="rows") as bar:
            rows[setting] = tokenise(found, tokenizer, template, limit, setting, advance=bar.advance)
        if dropped := rows[setting].dropped:
            say(f"{setting}: {dropped} of {len(found)} rows are longer than {limit} tokens and were dropped")
    held_out, validation = rows.get("eval.file"), rows.get("train.validation_file")
    return Prepared(base, tokenizer, template, rows["train.file"], held_out, validation, facts, targets, precision)


def prepare_again(prepared: Prepared, config: PreftConfig) -> Prepared:
    """The same rows and base model for `config`, which differs in nothing that they depend on.

    Raises:
        UserError: settings that do not fit the base model or this machine.
    """
    return replace(prepared, targets=_targets(config, prepared.facts), precision=choose_precision(config.train.dtype))


def _targets(config: PreftConfig, facts: BaseFacts) -> dict[str, list[str]]:
    return {part.name: part.targets(config.adapter, facts) for part in parts_of(config.adapter.method)}


def idle_settings(config: AdapterConfig) -> list[str]:
    """What is set and belongs to a part that the method has not."""
    used = parts_of(config.method)
    idle = {key for part in PARTS.values() if part not in used for key in part.own_keys}
    return [f"adapter.{key}" for key in sorted(idle & config.model_fields_set)]


def load_tokenizer(base: BaseModel) -> Any:
    """The base model's tokenizer.

    Raises:
        UserError: the folder holds none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(base.path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.base: {base.path} has no usable tokenizer: {error}") from error
