"""The chat template that training and serving share."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from preft_cli.data.content_format import wants_parts
from preft_cli.errors import UserError

_SENTINEL = "xyzzy"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the ids that a server stops at."""

    text: str | None
    """Jinja; None for a tokenizer without one, which can only train on prompt/completion records."""
    end_of_turn_id: int
    """The token that ends the assistant's turn, appended once to each completion."""
    stop_ids: frozenset[int] = frozenset()
    """All ids that a server stops at; a template may end calls of tools with another one than text."""
    tools_text: str | None = None
    """The template for chats with tools, if the tokenizer has one of its own for them."""

    @property
    def digest(self) -> str | None:
        """sha256 of the template's text, and of that for tools if there is one."""
        return None if self.text is None else hashlib.sha256((self.text + (self.tools_text or "")).encode()).hexdigest()

    def text_for(self, tools: object) -> str | None:
        """What renders a chat that has `tools`, or none."""
        return self.tools_text if tools and self.tools_text else self.text

    @cached_property
    def parts(self) -> bool:
        """Whether the server hands it the content of messages as lists of parts."""
        return self.text is not None and wants_parts(self.text)


def load_template(tokenizer: Any, folder: Path, file: Path | None) -> ChatTemplate:
    """The template in `file` (`model.chat_template`), else the tokenizer's own; `folder` is the base model's.

    Raises:
        UserError: the file is missing, or the tokenizer has no EOS token.
    """
    text = _read(file) if file else _own(tokenizer)
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.base: the tokenizer in {folder} has no EOS token, so that an answer could never end")
    stop_ids = frozenset({int(tokenizer.eos_token_id)} | _stop_ids(folder))
    tools_text = None if file else _for_tools(tokenizer)
    return ChatTemplate(text, _end_of_turn(tokenizer, text, stop_ids), stop_ids, tools_text)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"model.chat_template: {file} cannot be read: {error}") from error


def _own(tokenizer: Any) -> str | None:
    return tokenizer.get_chat_template() if tokenizer.chat_template else None


def _for_tools(tokenizer: Any) -> str | None:
    """Some tokenizers have a template called tool_use, which a server takes for requests with tools."""
    several = isinstance(tokenizer.chat_template, dict)
    return tokenizer.chat_template.get("tool_use") if several else None


def _stop_ids(folder: Path) -> set[int]:
    """What generation_config.json adds to the tokenizer's EOS; the server stops at these too."""
    file = folder / "generation_config.json"
    found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    return {found} if isinstance(found, int) else set(found or ())


def _end_of_turn(tokenizer: Any, text: str | None, stop_ids: frozenset[int]) -> int:
    """The stop id that the template itself writes after an answer, else the tokenizer's EOS.

    They differ in some chat models, whose turns end with a token of their own: trained to end with the wrong one, such
    a model would meet a token after its answers that it never saw there.
    """
    eos = int(tokenizer.eos_token_id)
    if text is None:
        return eos
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _SENTINEL}]
    try:
        rendered = tokenizer.apply_chat_template(messages, chat_template=text, tokenize=False)
    except Exception:
        # The template's own objections; a template that refuses real rows is reported with the row.
        return eos
    after = tokenizer(rendered.rpartition(_SENTINEL)[2].lstrip(), add_special_tokens=False)["input_ids"]
    return after[0] if after and after[0] in stop_ids else eos
