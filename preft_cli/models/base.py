"""What a resolved base model is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engine_patch.base_model import BaseFingerprint, weights_digest
from preft_cli.errors import UserError


@dataclass(frozen=True)
class BaseModel:
    """A base model on this machine."""

    name: str
    """As written in the config."""
    path: Path
    """Local folder with config.json and, unless random, tokenizer and weights."""
    random: bool = False
    """Only the shape is real: no tokenizer, no weights."""

    @cached_property
    def hf_config(self) -> Any:
        """The model's Transformers config.

        Raises:
            UserError: when config.json cannot be read as the config of a known architecture.
        """
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.path)
        except (ValueError, OSError, KeyError, TypeError, StrictDataclassError) as error:
            raise UserError(f"model.base: {self.path / 'config.json'} is not a usable model config: {error}") from error

    @cached_property
    def fingerprint(self) -> BaseFingerprint:
        """What an adapter of this model must agree with; reads a few samples of the weights, not all of them."""
        weights = None if self.random else weights_digest(self.path)
        return BaseFingerprint.from_hf_config(self.hf_config, weights=weights)
