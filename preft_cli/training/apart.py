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
    if train.packing:
        raise UserError(f"train.packing: rows in one sequence of {name} could see each other: {problem}", exit_code=2)
    if "share_prompts" in train.model_fields_set:
        raise UserError(
            f"train.share_prompts: rows in one sequence of {name} could see each other: {problem}, or leave the key out",
            exit_code=2,
        )
    say(f"train.share_prompts is off: rows in one sequence of {name} could see each other: {problem}")
    return Apart(share_prompts=False, packing=False)


def _problem(hf_config: Any, limit: int) -> str | None:
    """Why rows cannot be kept apart, and what to do."""
    config = hf_config.get_text_config()
    if config.model_type not in KNOWN:
        return f"that is known not to be for {', '.join(KNOWN)} alone, and this is {config.model_type}; set it to false"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}; set it to false"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < limit:
        return f"its attention has a sliding window; set train.max_length to its {window} tokens or less, or set it to false"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)} & set(UNSTEADY_ROPE)
    if kinds:
        return f"its positions (rope_type {kinds.pop()}) depend on the rows beside; set it to false"
    return None
