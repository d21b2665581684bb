"""Turns to token ids, as the server computes them.

The server renders a chat with `add_generation_prompt=True` and tokenises that text without special tokens, since the
template writes BOS itself; a text prompt of the completions endpoint is tokenised with special tokens. Prompt and
completion are never tokenised as one string: the ids around the boundary would depend on the answer, which the server
does not know yet. An answer that calls tools is what the template writes for it after the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from preft_cli.data.read import raise_all
from preft_cli.data.render import answer_with_calls, render, unseen
from preft_cli.data.template import ChatTemplate
from preft_cli.data.turn import Message, Row, Turn
from preft_cli.errors import UserError


@dataclass(frozen=True)
class LongRow:
    """A row that was dropped."""

    where: str
    tokens: int


@dataclass(frozen=True)
class TokenisedRows:
    """What is left of a file for training."""

    rows: list[Row]
    dropped: int
    """Rows longer than the limit: cut rows would lose the end of their completion, or all of it."""
    long: list[LongRow] = field(default_factory=list)
    """Which they were."""
    unseen: Counter[str] = field(default_factory=Counter)
    """How many rows have something of tools in the prompt that the chat template leaves out in silence; see `unseen`."""

    def remarks(self, setting: str, limit: int) -> list[str]:
        """What the user must know about the rows of the file that `setting` names."""
        lines = []
        if self.dropped:
            total = self.dropped + len(self.rows)
            lines.append(f"{setting}: {self.dropped} of {total} rows are longer than {limit} tokens and were dropped")
        for key, rows in self.unseen.items():
            lines.append(
                f"{setting}: the chat template leaves out the {key} of {rows} rows, on the server too: the model is neither "
                "trained on them nor ever sees them. Set a model.chat_template that writes them."
            )
        return lines


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
    long: list[LongRow] = []
    unseen_rows: Counter[str] = Counter()
    for turn in turns:
        advance()
        try:
            row = tokenise_turn(turn, tokenizer, template)
            left_out = unseen(turn, tokenizer, template)
        except UserError as error:
            errors.append(str(error))
            continue
        if len(row) > max_length:
            long.append(LongRow(row.where, len(row)))
        else:
            rows.append(row)
            unseen_rows.update(left_out)
    raise_all(errors)
    if not rows:
        longest = max((row.tokens for row in long), default=0)
        raise UserError(
            f"{setting}: no row is left: all {len(long)} are longer than train.max_length = {max_length} tokens "
            f"(the longest has {longest}). Raise train.max_length, or shorten the conversations."
        )
    return TokenisedRows(rows, len(long), long, unseen_rows)


def tokenise_turn(turn: Turn, tokenizer: Any, template: ChatTemplate) -> Row:
    """One turn in token ids; see `Row`."""
    prompt_ids = prompt_token_ids(turn.prompt, tokenizer, template, turn.where, turn.tools)
    if not prompt_ids:
        raise UserError(f"{turn.where}: the prompt has no token; a server refuses such a request")
    completion, end_id = turn.completion, template.end_of_turn_id
    if isinstance(completion, Message):
        completion, end_id = answer_with_calls(turn, completion, tokenizer, template)
    return Row(prompt_ids, [*_ids(tokenizer, completion, special=False), end_id], turn.where)


def prompt_token_ids(
    prompt: tuple[Message, ...] | str,
    tokenizer: Any,
    template: ChatTemplate,
    where: str = "prompt",
    tools: tuple[dict[str, Any], ...] = (),
) -> list[int]:
    """What the server's chat endpoint (messages and tools) or completions endpoint (text) makes of `prompt`."""
    if isinstance(prompt, str):
        return _ids(tokenizer, prompt, special=True)
    return _ids(tokenizer, render(prompt, tools, tokenizer, template, where), special=False)


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])
