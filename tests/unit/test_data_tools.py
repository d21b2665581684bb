"""Definitions and calls of tools: what is read, what is refused, and what of them is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft_cli.data import Message, Turn, read_turns
from preft_cli.data.template import ChatTemplate, load_template
from preft_cli.data.tokenise import tokenise, tokenise_turn
from preft_cli.data.turn import ToolCall
from preft_cli.errors import UserError
from tests.unit.tiny import CHATML, TOOL_CHATML, tiny_tokenizer

TOOL = {"type": "function", "function": {"name": "foo", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "foo", "arguments": '{"bar": 1}'}}
CHAT = [
    {"role": "user", "content": "foo bar"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "baz", "tool_call_id": "c1", "name": "foo"},
    {"role": "assistant", "content": "hello world"},
]


def read(tmp_path: Path, **record: Any) -> list[Turn]:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record))
    return read_turns(path)


def rows(tmp_path: Path, turns: list[Turn], template: str) -> tuple[Any, ChatTemplate, Any]:
    tokenizer = tiny_tokenizer(template)
    own = load_template(tokenizer, tmp_path, None)
    return tokenizer, own, tokenise(turns, tokenizer, own, max_length=400)


def test_calls_results_and_definitions_are_read(tmp_path: Path) -> None:
    first, second = read(tmp_path, messages=CHAT, tools=[TOOL])
    assert first.completion == Message("assistant", (), (ToolCall("foo", {"bar": 1}, "c1"),))
    assert second.prompt[-2:] == (first.completion, Message("tool", "baz", tool_call_id="c1", name="foo"))
    assert (second.completion, second.tools) == ("hello world", (TOOL,))
    (as_text, _) = read(tmp_path, messages=CHAT, tools=json.dumps([TOOL]))
    assert as_text == first


def test_an_answer_with_calls_is_what_the_template_writes_after_the_prompt(tmp_path: Path) -> None:
    """One id ends it, as after text; the prompt of the next answer begins with both."""
    tokenizer, own, data = rows(tmp_path, read(tmp_path, messages=CHAT, tools=[TOOL]), TOOL_CHATML)
    call, answer = data.rows
    assert '<tools>{"type": "function", "function": {"name": "foo", "description": null' in tokenizer.decode(
        call.prompt_ids
    )
    assert (
        tokenizer.decode(call.completion_ids)
        == '<tool_call>{"name": "foo", "arguments": {"bar": 1}}</tool_call><|im_end|>'
    )
    assert call.completion_ids.count(own.end_of_turn_id) == 1
    whole = call.prompt_ids + call.completion_ids
    assert answer.prompt_ids[: len(whole)] == whole
    assert data.unseen == {}


def test_calls_that_end_with_a_stop_id_of_their_own(tmp_path: Path) -> None:
    """As Llama 3.1's <|eom_id|>, if the server stops there."""
    template = TOOL_CHATML.replace(
        "{% endfor %}<|im_end|>", "{% endfor %}{{ '<|turn_end|>' if message.tool_calls else '<|im_end|>' }}"
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 4, 99999]}')
    tokenizer, _, data = rows(tmp_path, read(tmp_path, messages=CHAT[:2], tools=[TOOL]), template)
    assert tokenizer.decode(data.rows[0].completion_ids).endswith("</tool_call><|turn_end|>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML, 'the chat template leaves out "tool_calls": there is nothing of them to learn'),
        (TOOL_CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"),
         "the chat template writes a conversation with tool calls otherwise than its own prompt for them begins"),
        (TOOL_CHATML.replace("<tool_call>", "<|im_end|><tool_call>"), "writes <|im_end|> in the middle"),
        ("{{ messages[3].content }}", "the chat template refuses this conversation"),
    ],
    ids=["left-out", "thinking", "stops-inside", "refuses"],
)  # fmt: skip
def test_templates_that_cannot_write_calls_are_named_with_the_line(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        rows(tmp_path, read(tmp_path, messages=CHAT[:2], tools=[TOOL]), template)
    assert str(caught.value).startswith(f"{tmp_path / 'data.jsonl'}:1: ")
    assert reason in str(caught.value)


def test_tools_that_the_template_leaves_out_are_said_once(tmp_path: Path) -> None:
    """Nobody may think that they were trained on: neither definitions nor earlier calls."""
    turns = read(tmp_path, messages=CHAT, tools=[TOOL])[1:] * 3
    _, _, data = rows(tmp_path, turns, CHATML)
    tools, calls = data.remarks("train.file", 400)
    assert tools.startswith('train.file: the chat template leaves out the "tools" of 3 rows, on the server too')
    assert 'leaves out the "tool_calls" of 3 rows' in calls
    assert not rows(tmp_path, turns, TOOL_CHATML)[2].remarks("train.file", 400)
    deaf = TOOL_CHATML.replace("in messages", "in messages if message.role != 'tool'")
    (results,) = rows(tmp_path, turns, deaf)[2].remarks("train.file", 400)
    assert "leaves out the messages of role tool of 3 rows" in results


def test_a_template_for_tools_of_its_own(tmp_path: Path) -> None:
    """Some tokenizers hold two; the server takes tool_use when a request has tools."""
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.chat_template = {"default": CHATML, "tool_use": TOOL_CHATML}
    own = load_template(tokenizer, tmp_path, None)
    with_tools, without = (
        tokenizer.decode(tokenise_turn(Turn((Message("user", "x"),), "y", "here", tools), tokenizer, own).prompt_ids)
        for tools in ((TOOL,), ())
    )
    assert "<tools>" in with_tools
    assert "<tools>" not in without
    assert own.digest != load_template(tiny_tokenizer(CHATML), tmp_path, None).digest


@pytest.mark.parametrize(
    ("tools", "found"),
    [
        ("foo", '"tools": not JSON: Expecting value'),
        ('{"a": 1}', '"tools": found an object; expected a list'),
        (7, '"tools": found a number; expected a list'),
        (False, '"tools": found true or false; expected a list'),
        (["foo"], '"tools": tool 1: found text; expected {"type": "function"'),
        ([TOOL, {"name": "foo"}], '"tools": tool 2: found the key "name"; expected {"type": "function"'),
        ([{"type": "function", "function": {"description": "x"}}], '"tools": tool 1: its function has no name'),
        ([{**TOOL, "type": "retrieval"}], 'found "type": \'retrieval\'; expected "function"'),
        ([{"function": {"name": "f", "parameters": "{}"}}], '"parameters" is text; expected an object'),
        ([{"function": {"name": "f", "description": ["x"]}}], '"description" is a list; expected text'),
    ],
)
def test_definitions_that_the_server_would_refuse(tmp_path: Path, tools: Any, found: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, messages=CHAT, tools=tools)
    assert str(caught.value).startswith(f"{tmp_path / 'data.jsonl'}:1: ")
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("foo", 'message 2: tool call 1: found text; expected {"type"'),
        ({}, "message 2: tool call 1: found an empty object"),
        ({"function": {"arguments": "{}"}}, "message 2: tool call 1: its function has no name"),
        ({"function": {"name": "", "arguments": "{}"}}, "its function has no name"),
        ({"function": {"name": "f", "arguments": "{oops"}}, '"arguments": not JSON: Expecting'),
        ({"function": {"name": "f", "arguments": "[1]"}}, '"arguments": found a list; expected an object'),
        ({"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}, '"arguments": found the key "a" twice'),
        ({"function": {"name": "f", "arguments": 7}}, '"arguments": found a number; expected an object'),
        ({"id": 7, "function": {"name": "f"}}, '"id" is a number; expected text'),
        ({"type": "custom", "function": {"name": "f"}}, "found \"type\": 'custom'"),
    ],
)
def test_calls_that_the_server_would_refuse_or_repair(tmp_path: Path, call: Any, found: str) -> None:
    with pytest.raises(UserError, match=r"data.jsonl:1: ") as caught:
        read(tmp_path, messages=[CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert found in str(caught.value)


def test_where_tools_have_no_place(tmp_path: Path) -> None:
    for record, found in (
        ({"prompt": "x", "completion": "y", "tools": [TOOL]}, 'found "tools" beside "prompt"'),
        ({"messages": [{**CHAT[0], "tool_calls": [CALL]}, CHAT[3]]}, "messages of role 'assistant' only, found 'user'"),
        ({"messages": [CHAT[0], {"role": "assistant", "tool_calls": "foo"}]}, '"tool_calls" is text; expected a list'),
        ({"messages": CHAT[1:]}, "the first message is the assistant's"),
    ):
        with pytest.raises(UserError) as caught:
            read(tmp_path, **record)
        assert found in str(caught.value)
