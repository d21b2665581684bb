"""Prompt ids are the server's, the completion is tokenised on its own, and nothing is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft_cli.data import Message, Turn
from preft_cli.data.template import ChatTemplate, load_template
from preft_cli.data.tokenise import tokenise, tokenise_turn
from preft_cli.errors import UserError
from tests.unit.tiny import CHATML, tiny_tokenizer

CHAT = Turn((Message("user", "foo bar"),), "hello world", "data.jsonl:1")
# As reasoning models do: the generation prompt opens with text that a rendered conversation does not have.
THINKING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
WRITES_BOS = "{{ bos_token }}" + CHATML


def template(tokenizer: Any, folder: Path, file: Path | None = None) -> ChatTemplate:
    return load_template(tokenizer, folder, file)


def test_case_3_boundary_in_the_middle_of_a_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    row = tokenise_turn(Turn("foo ba", "r", "here"), tokenizer, template(tokenizer, tmp_path))
    assert row.prompt_ids == tokenizer("foo ba")["input_ids"]
    assert row.completion_ids == [*tokenizer("r")["input_ids"], tokenizer.eos_token_id]
    joined = tokenizer("foo bar")["input_ids"]
    assert joined[: len(row.prompt_ids)] != row.prompt_ids, "the example no longer splits a token"


def test_case_4_generation_prompt_with_text_of_its_own(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(THINKING)
    row = tokenise_turn(CHAT, tokenizer, template(tokenizer, tmp_path))
    served = tokenizer.apply_chat_template(
        [{"role": "user", "content": "foo bar"}], add_generation_prompt=True, return_dict=False
    )
    assert row.prompt_ids == served
    assert tokenizer.decode(row.prompt_ids).endswith("<|im_start|>assistant\n<think>\n")
    assert tokenizer.decode(row.completion_ids) == "hello world<|im_end|>"


@pytest.mark.parametrize("written_by_template", [True, False])
def test_case_7_one_bos_at_most_in_a_chat(tmp_path: Path, written_by_template: bool) -> None:
    tokenizer = tiny_tokenizer(WRITES_BOS if written_by_template else CHATML, adds_bos=True)
    row = tokenise_turn(CHAT, tokenizer, template(tokenizer, tmp_path))
    assert (row.prompt_ids + row.completion_ids).count(tokenizer.bos_token_id) == written_by_template


def test_text_prompts_get_the_tokenizers_bos_and_completions_none(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(adds_bos=True)
    row = tokenise_turn(Turn("foo", " bar", "here"), tokenizer, template(tokenizer, tmp_path))
    assert row.prompt_ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in row.completion_ids


def test_template_file_replaces_the_tokenizers(tmp_path: Path) -> None:
    tokenizer, file = tiny_tokenizer(), tmp_path / "own.jinja"
    file.write_text("Q: {{ messages[-1]['content'] }} A:")
    own = template(tokenizer, tmp_path, file)
    assert tokenizer.decode(tokenise_turn(CHAT, tokenizer, own).prompt_ids) == "Q: foo bar A:"
    assert own.digest != template(tokenizer, tmp_path).digest
    with pytest.raises(UserError, match=r"model.chat_template: .*none.jinja cannot be read"):
        template(tokenizer, tmp_path, tmp_path / "none.jinja")


def test_turns_end_with_what_the_template_writes_if_the_server_stops_there(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(CHATML.replace("<|im_end|>", "<|turn_end|>"))
    turn_end = tokenizer.convert_tokens_to_ids("<|turn_end|>")
    assert template(tokenizer, tmp_path).end_of_turn_id == tokenizer.eos_token_id
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, turn_end]}))
    assert template(tokenizer, tmp_path).end_of_turn_id == turn_end


def test_case_5_long_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    """A prompt of 200 tokens and an answer of 5 at max_length 64: never cut, and never trained on nothing."""
    tokenizer = tiny_tokenizer()
    own = template(tokenizer, tmp_path)
    long = Turn("q" * 200, "zzzz", "data.jsonl:2")
    row = tokenise_turn(long, tokenizer, own)
    assert (len(row.prompt_ids), len(row.completion_ids)) == (200, 5)
    data = tokenise([CHAT, long], tokenizer, own, max_length=64)
    assert [row.where for row in data.rows] == ["data.jsonl:1"]
    assert data.dropped == 1
    assert [(row.where, row.tokens) for row in data.long] == [("data.jsonl:2", 205)]
    assert data.remarks("train.file", 64) == ["train.file: 1 of 2 rows are longer than 64 tokens and were dropped"]
    assert data.rows[0].completion_ids[-1] == tokenizer.eos_token_id
    with pytest.raises(UserError, match=r"no row is left: all 1 are longer .* \(the longest has 205\)"):
        tokenise([long], tokenizer, own, max_length=64)


def test_a_row_of_exactly_the_limit_is_kept(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    own = template(tokenizer, tmp_path)
    length = len(tokenise_turn(CHAT, tokenizer, own))
    assert len(tokenise([CHAT], tokenizer, own, max_length=length).rows) == 1
    with pytest.raises(UserError, match=rf"all 1 are longer than train.max_length = {length - 1} .*has {length}\)"):
        tokenise([CHAT], tokenizer, own, max_length=length - 1)


def test_what_a_template_refuses_is_reported_with_the_line(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("{{ raise_exception('no system message please') }}")
    with pytest.raises(
        UserError, match=r"data.jsonl:1: the chat template refuses this conversation: no system message"
    ):
        tokenise([CHAT], tokenizer, template(tokenizer, tmp_path), max_length=64)


def test_chat_without_any_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(None)
    own = template(tokenizer, tmp_path)
    assert own.digest is None
    with pytest.raises(UserError, match=r"has no chat template. Set model.chat_template"):
        tokenise_turn(CHAT, tokenizer, own)
    assert tokenise_turn(Turn("foo", "bar", "here"), tokenizer, own).prompt_ids


def test_empty_prompts_and_tokenizers_without_eos(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(UserError, match="here: the prompt has no token"):
        tokenise_turn(Turn("", "bar", "here"), tokenizer, template(tokenizer, tmp_path))
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="has no EOS token"):
        template(tokenizer, tmp_path)
