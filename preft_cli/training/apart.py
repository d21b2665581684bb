"""Whether rows in one sequence can be kept apart, which takes a mask of our own and positions that are given. No torch here."""

from __future__ import annotations

from typing import Any, NamedTuple

from preft_cli.config.schema import TrainConfig
from preft_cli.console import say
from preft_cli.errors import UserError

KNOWN = ("gemma", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""Architectures (`model_type`) whose full attention takes a mask as it is and whose positions are the given ones: measured."""
UNSTEADY_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest row of the batch."""


class Apart(NamedTuple):
    """What is done with rows of one step."""

    share_prompts: bool
    packing: bool

    @property
    def needs_mask(self) -> bool:
        """Whether sequences with several rows may come."""
        return self.share_prompts or self.packing


def keep_apart(train: TrainConfig, hf_config: Any, name: str, limit: int) -> Apart:
    """What the model called `name` can do of what the config asks for; rows have at most `limit` tokens.

    Raises:
        UserError: the config asks for it by name. What is only on by default is switched off with a message.
    """
    wanted = Apart(train.share_prompts, train.packing)
    if not wanted.needs_mask or (problem := _problem(hf_config, limit)) is None:
        return wanted
    why = f"on {name} rows in one sequence could see each other: {problem.reason}"
    for key in ("packing", "share_prompts"):
        if getattr(train, key) and key in train.model_fields_set:
            raise UserError(f"train.{key}: {why}. Set it to false{problem.otherwise}", exit_code=2)
    say(f"train.share_prompts is off: {why}")
    return Apart(share_prompts=False, packing=False)


class _Problem(NamedTuple):
    """Why rows cannot be kept apart, and what helps beside not asking for it."""

    reason: str
    otherwise: str = ""


def _problem(hf_config: Any, limit: int) -> _Problem | None:
    config = hf_config.get_text_config()
    if config.model_type not in KNOWN:
        return _Problem(f"it is a {config.model_type}, and they are known to be kept apart on {', '.join(KNOWN)}")
    if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return _Problem(f"it has layers of {', '.join(sorted(kinds))}")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < limit:
        reason = f"its attention has a sliding window of {window} tokens, and rows may have {limit}"
        return _Problem(reason, f", or train.max_length to {window} or less")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)} & set(UNSTEADY_ROPE)
    return _Problem(f"its positions (rope_type {kinds.pop()}) depend on the rows beside") if kinds else None
