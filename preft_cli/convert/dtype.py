"""The type of a stored adapter's weights: cast once, when it is converted, so that the server need not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preft_cli.config.schema import PreftConfig


def served_dtype(config: PreftConfig, base_config: Mapping[str, Any] | None) -> str | None:
    """`convert.dtype`; for auto, `serve.dtype`; if that is auto too, the base model's own if it is a half type.

    `base_config` is the base model's `config.json`, None if it is not known yet. None as a result: each adapter keeps its
    own type. A float32 base says nothing, since servers run it in a half type more often than not.
    """
    for asked in (config.convert.dtype, config.serve.dtype):
        if asked != "auto":
            return asked
    own = _own(base_config or {})
    return own if own in ("bfloat16", "float16") else None


def _own(base_config: Mapping[str, Any]) -> str | None:
    text = base_config.get("text_config")  # the text part of a multimodal model
    for part in (text if isinstance(text, Mapping) else {}, base_config):
        for key in ("dtype", "torch_dtype"):  # Transformers' present name and its former one
            if isinstance(value := part.get(key), str):
                return value.removeprefix("torch.")
    return None
