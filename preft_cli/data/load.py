"""The data files of a config, and what tokenises them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preft_cli.config.schema import PreftConfig
from preft_cli.console import progress
from preft_cli.data.read import is_hub_id, read_data
from preft_cli.data.template import ChatTemplate, load_template
from preft_cli.data.tokenise import TokenisedRows, tokenise
from preft_cli.data.turn import Turn
from preft_cli.errors import UserError
from preft_cli.models import BaseModel


@dataclass(frozen=True)
class DataFile:
    """A file, or a data set of the Hub, that the config names."""

    setting: str
    """The key that names it."""
    file: Path
    root: Path
    split: str | None = None

    @property
    def source(self) -> tuple[Path, str | None]:
        """What is read: a data set of the Hub has several splits, a file has none."""
        if is_hub_id(self.file, self.root):
            return self.file, self.split
        return (self.root / self.file).resolve(), None

    def read(self) -> list[Turn]:
        """Every assistant turn of it.

        Raises:
            UserError: see `read_data`.
        """
        return read_data(self.file, self.root, self.setting, self.split)


def data_files(config: PreftConfig, root: Path) -> dict[str, DataFile]:
    """By the key that names it, each data file of `config`: what is trained on comes first."""
    train = config.train
    named = {
        "train.file": train.file,
        "train.validation_file": train.validation_file,
        "eval.file": config.eval.file,
    }
    splits = {"train.file": train.split, "eval.file": config.eval.split}
    return {key: DataFile(key, file, root, splits.get(key)) for key, file in named.items() if file}


def trained_on(files: Mapping[str, DataFile]) -> list[str]:
    """What is wrong with files to evaluate on that are the one to train on: they cannot tell how good an adapter is on others."""
    train = files["train.file"].source
    return [
        f"{key}: {file.file} is train.file too; evaluate on rows that are not trained on"
        for key, file in files.items()
        if key != "train.file" and file.source == train
    ]


@dataclass(frozen=True)
class Tokens:
    """What makes token ids of turns, as the server of the same base model does."""

    tokenizer: Any
    template: ChatTemplate
    limit: int
    """Longest row, prompt and completion: of train.max_length and what the model takes."""


def tokenise_files(turns: Mapping[str, list[Turn]], tokens: Tokens) -> dict[str, TokenisedRows]:
    """The rows of each data file, by the key that names it, with their progress.

    Raises:
        UserError: see `tokenise`.
    """
    rows = {}
    for setting, found in turns.items():
        with progress(f"tokenising {setting}", total=len(found), unit="rows") as bar:
            rows[setting] = tokenise(found, tokens.tokenizer, tokens.template, tokens.limit, setting, bar.advance)
    return rows


def load_tokens(config: PreftConfig, root: Path, base: BaseModel) -> Tokens:
    """Tokenizer and chat template of `base`.

    Raises:
        UserError: the base model has no usable tokenizer, or the chat template's file cannot be read.
    """
    if base.random:
        raise UserError(f"model.base: {base.name} has random weights and no tokenizer: it can be served, not trained")
    tokenizer = load_tokenizer(base)
    file = root / config.model.chat_template if config.model.chat_template else None
    longest = config.train.max_length
    limit = min(longest, getattr(base.hf_config, "max_position_embeddings", None) or longest)
    return Tokens(tokenizer, load_template(tokenizer, base.path, file), limit)


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
