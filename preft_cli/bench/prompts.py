"""Real prompts for a benchmark, as token ids."""

from __future__ import annotations

from pathlib import Path

from preft_cli.errors import UserError
from preft_cli.models import BaseModel

SETTING = "bench.prompts"


def read_prompts(path: Path, base: BaseModel, chat_template: Path | None) -> list[list[int]]:
    """The prompts of a JSONL or Parquet file of conversations, as the server would tokenise them.

    Args:
        path: in one of the forms that training takes; the prompt of each answer counts.
        base: the model, whose tokenizer is used.
        chat_template: `model.chat_template`.

    Raises:
        UserError: lines that are wrong, or a model without a tokenizer.
    """
    if base.random:
        raise UserError(f"{SETTING}: random weights have no tokenizer for {path}; leave it out", exit_code=2)
    from transformers import AutoTokenizer

    from preft_cli.data.read import read_turns
    from preft_cli.data.template import load_template
    from preft_cli.data.tokenise import prompt_token_ids

    tokenizer = AutoTokenizer.from_pretrained(base.path)
    template = load_template(tokenizer, base.path, chat_template)
    return [
        prompt_token_ids(turn.prompt, tokenizer, template, turn.where, turn.tools) for turn in read_turns(path, SETTING)
    ]
