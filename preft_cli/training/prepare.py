"""Everything that can be wrong before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from preft_cli.config.schema import PreftConfig
from preft_cli.console import say
from preft_cli.data.load import data_files, tokenise_files, trained_on
from preft_cli.data.tokenise import TokenisedRows
from preft_cli.data.turn import Row
from preft_cli.errors import UserError
from preft_cli.training.apart import Apart
from preft_cli.training.arrange import pack_all
from preft_cli.training.foundation import Foundation, check_machine, lay_foundation, settings_of


@dataclass(frozen=True)
class Prepared(Foundation):
    """A run that has passed all checks."""

    train: TokenisedRows
    held_out: TokenisedRows | None
    validation: TokenisedRows | None
    sequences: list[list[Row]] | None
    """With packing, the training rows in each."""


def prepare(config: PreftConfig, root: Path) -> Prepared:
    """Read and tokenise the data and check every setting against the base model; no weights are loaded.

    Raises:
        UserError: anything that would fail later.
    """
    check_machine(config)
    files = data_files(config, root)
    if problems := trained_on(files):
        raise UserError("\n".join(problems), exit_code=2)
    turns = {setting: file.read() for setting, file in files.items()}
    foundation, tokens = lay_foundation(config, root)
    rows = tokenise_files(turns, tokens)
    for setting, found in rows.items():
        for remark in found.remarks(setting, tokens.limit):
            say(remark)
    return Prepared(
        **vars(foundation),
        train=rows["train.file"],
        held_out=rows.get("eval.file"),
        validation=rows.get("train.validation_file"),
        sequences=_sequences(rows["train.file"].rows, config, foundation.apart),
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
    check_machine(config)
    changed = settings_of(config, prepared.base, prepared.facts, prepared.limit)
    return replace(prepared, **changed, sequences=_sequences(prepared.train.rows, config, changed["apart"]))
