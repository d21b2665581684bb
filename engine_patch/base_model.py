"""Which base model an adapter belongs to: the numbers that must agree before one weight of it may be served."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from engine_patch.errors import PreftError

_WINDOW = 64 * 1024
_WINDOWS_A_FILE = 8
_SHAPE_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True)
class BaseFingerprint:
    """What an adapter and the served base model must agree on. None means unknown and is not compared."""

    model_type: str | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    vocab_size: int | None = None
    weights: str | None = None
    """`weights_digest` of the base model's folder; None for random or unknown weights."""

    @classmethod
    def from_hf_config(cls, config: Any, weights: str | None = None) -> BaseFingerprint:
        """From a transformers config object, or the dict of a `config.json` (the text part of a multimodal one)."""
        if isinstance(config, Mapping):
            text: Any = config.get("text_config") or config
            values = {name: text.get(name) for name in _SHAPE_FIELDS}
        else:
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            values = {name: getattr(text, name, None) for name in _SHAPE_FIELDS}
        if values["num_key_value_heads"] is None:
            # Configs written before grouped-query attention leave it out: as many as there are heads.
            values["num_key_value_heads"] = values["num_attention_heads"]
        return cls(**values, weights=weights)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, every field."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BaseFingerprint:
        """The inverse of `to_dict`; a missing field is unknown, a foreign one is ignored."""
        return cls(*(data.get(name) for name in (*_SHAPE_FIELDS, "weights")))

    def mismatch(self, served: BaseFingerprint) -> str | None:
        """What differs from the `served` base model, with both values, or None when nothing does."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(served, field.name)
            if mine is None or theirs is None or mine == theirs:
                continue
            if field.name == "weights":
                return (
                    f"the base model's weights differ: digest {mine} in the adapter and {theirs} in the base model "
                    "(same shapes, other weights)"
                )
            return f"{field.name} is {mine} in the adapter and {theirs} in the base model"
        return None


def weights_digest(model_dir: Path) -> str | None:
    """A short digest of the weights in `model_dir`, or None when it holds no safetensors file.

    Reads the headers and a few windows of 64 KiB of each file, so that 100 GB take a moment: it tells apart base models
    that were trained differently, it does not guard against tampering.

    Raises:
        PreftError: a file that is no safetensors file.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        for chunk in _samples(path):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def _samples(path: Path) -> Iterator[bytes]:
    """The tensor table and evenly spaced windows of one file."""
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            table = json.loads(file.read(length))
            # Who saved it, and with what, says nothing about the weights.
            table.pop("__metadata__", None)
        except (struct.error, ValueError, AttributeError) as error:
            raise PreftError(f"{path} is not a safetensors file, or truncated; fetch the base model again") from error
        yield json.dumps(table, sort_keys=True).encode()
        start, size = 8 + length, max(path.stat().st_size - 8 - length, 0)
        for index in range(_WINDOWS_A_FILE):
            file.seek(start + max(size - _WINDOW, 0) * index // (_WINDOWS_A_FILE - 1))
            yield file.read(_WINDOW)
