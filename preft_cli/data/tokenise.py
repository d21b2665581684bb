"""Turns to token ids, as the server computes them.

The server renders a chat with `add_generation_prompt=True` and tokenises that text without special tokens, since the
template writes BOS itself; a text prompt of the completions endpoint is tokenised with special tokens. Prompt and
completion are never tokenised as one string: the ids around the boundary would depend on the answer, which the server
does not know yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from preft_cli.data.read import raise_all
from preft_cli.data.template import ChatTemplate
from preft_cli.data.turn import Message, Row, Turn
from preft_cli.errors import UserError


@dataclass(frozen=True)
class TokenisedRows:
    """What is left of a file for training."""

    rows: list[Row]
    dropped: int
    """Rows longer than the limit: cut rows would lose the end of their completion, or all of it."""


def tokenise(
    turns: Iterable[Turn],
    tokenizer: Any,
    template: ChatTemplate,
    max_length: int,
    setting: str = "train.file",
    advance: Callable[[], None] = lambda: None,
) -> TokenisedRows:
    """The rows of at most `max_length` prompt and completion tokens; longer ones are dropped and counted.

    `setting` is the config key that names the file; `advance` is called once a turn.

    Raises:
        UserError: the chat template refuses turns, a prompt has no token at all, or no row is left.
    """
    rows: list[Row] = []
    errors: list[str] = []
    longest = dropped = 0
    for turn in turns:
        advance()
        try:
            row = tokenise_turn(turn, tokenizer, template)
        except UserError as error:
            errors.append(str(error))
            continue
        longest = max(longest, len(row))
        if len(row) > max_length:
            dropped += 1
        else:
            rows.append(row)
    raise_all(errors)
    if not rows:
        raise UserError(
            f"{setting}: no row is left: all {dropped} are longer than train.max_length = {max_length} tokens "
            f"(the longest has {longest}). Raise train.max_length, or shorten the conversations."
        )
    return TokenisedRows(rows, dropped)


def tokenise_turn(turn: Turn, tokenizer: Any, template: ChatTemplate) -> Row:
    """One turn in token ids; see `Row`."""
    prompt_ids = prompt_token_ids(turn.prompt, tokenizer, template, turn.where)
    if not prompt_ids:
        raise UserError(f"{turn.where}: the prompt has no token; a server refuses such a request")
    return Row(prompt_ids, [*_ids(tokenizer, turn.completion, special=False), template.end_of_turn_id], turn.where)


def prompt_token_ids(
    prompt: tuple[Message, ...] | str, tokenizer: Any, template: ChatTemplate, where: str = "prompt"
) -> list[int]:
    """What the server's chat endpoint (messages) or completions endpoint (text) makes of `prompt`."""
    if isinstance(prompt, str):
        return _ids(tokenizer, prompt, special=True)
    if template.text is None:
        raise UserError(
            f"{where}: the base model's tokenizer has no chat template. Set model.chat_template, or train on "
            '{"prompt": …, "completion": …} records.'
        )
    try:
        rendered = tokenizer.apply_chat_template(
            [message._asdict() for message in prompt],
            chat_template=template.text,
            add_generation_prompt=True,
            tokenize=False,
        )
    except Exception as error:
        raise UserError(f"{where}: the chat template refuses this conversation: {error}") from error
    return _ids(tokenizer, rendered, special=False)


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])
