"""JSONL in: the four forms load alike, and everything else is refused with its line and what is expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft_cli.data import Message, Turn, read_turns
from preft_cli.errors import UserError

USER_X = Message("user", "x")
CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


def write(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return path


def turns(tmp_path: Path, *records: Any) -> list[tuple[Any, str]]:
    return [(turn.prompt, turn.completion) for turn in read_turns(write(tmp_path, *records))]


def refusal(tmp_path: Path, *records: Any) -> str:
    with pytest.raises(UserError) as caught:
        read_turns(write(tmp_path, *records))
    return str(caught.value)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": CHAT},
        {"messages": CHAT, "id": 7, "source": "anywhere"},
        {"messages": [{**CHAT[0], "name": None}, {**CHAT[1], "tool_calls": []}]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
        {"conversations": [{"from": "user", "value": "x"}, {"from": "assistant", "value": "y"}]},
        {"instruction": "x", "input": "", "output": "y"},
        {"instruction": "x", "output": "y"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, CHAT[1]]},
        {"messages": CHAT, "prompt": None, "completion": None},
    ],
)
def test_case_6_chat_forms_load_alike(tmp_path: Path, record: dict[str, Any]) -> None:
    found = turns(tmp_path, record)
    assert [(tuple((m.role, m.text) for m in prompt), answer) for prompt, answer in found] == [((("user", "x"),), "y")]


def test_case_6_prompt_and_completion_stay_text(tmp_path: Path) -> None:
    assert turns(tmp_path, {"prompt": "foo ba", "completion": "r"}) == [("foo ba", "r")]


def test_alpaca_input_follows_the_instruction(tmp_path: Path) -> None:
    ((prompt, _),) = turns(tmp_path, {"instruction": "x", "input": "z", "output": "y", "system": "s"})
    assert prompt == (Message("system", "s"), Message("user", "x\n\nz"))


def test_a_system_prompt_beside_the_messages_comes_first(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"system": "Be a pirate.", "messages": CHAT}))
    [turn] = read_turns(tmp_path / "data.jsonl")
    assert turn.prompt[0].text == "Be a pirate."  # type: ignore[union-attr]


def test_sharegpt_system_comes_first(tmp_path: Path) -> None:
    chat = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    ((prompt, _),) = turns(tmp_path, {"system": "s", "conversations": chat})
    assert prompt == (Message("system", "s"), USER_X)


def test_one_row_for_each_assistant_turn(tmp_path: Path) -> None:
    second = [{"role": "user", "content": "x2"}, {"role": "assistant", "content": "y2"}]
    unanswered = {"role": "user", "content": "x3"}
    found = turns(tmp_path, {"messages": [*CHAT, *second, unanswered]})
    assert found == [
        ((USER_X,), "y"),
        ((USER_X, Message("assistant", "y"), Message("user", "x2")), "y2"),
    ]


def test_where_names_file_and_line_and_blank_lines_count(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": CHAT}, "", {"messages": CHAT})
    assert [turn.where for turn in read_turns(path)] == [f"{path}:1", f"{path}:3"]
    assert isinstance(read_turns(path)[0], Turn)


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"messages": CHAT}).encode() + b"\r\n")
    assert len(read_turns(path)) == 1


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"txt": "x"}, 'found the key "txt"; expected one of {"messages": …}'),
        (
            {"text": "x"},
            'found plain text ("text"): it has no prompt, hence no token that an adapter on prompt tokens could',
        ),
        ({}, "found an empty object; expected one of"),
        ([1], "found a list; expected one of"),
        ({"prompt": "x"}, 'found the key "prompt" but no "completion"'),
        ({"prompt": CHAT, "completion": "y"}, '"prompt": found a list; expected text'),
        ({"prompt": "x", "completion": ""}, '"completion" is empty'),
        ({"messages": CHAT, "conversations": []}, "found both messages and conversations"),
        ({"messages": "x"}, '"messages": found text; expected a list'),
        ({"messages": []}, '"messages": found an empty list'),
        ({"messages": ["x"]}, 'message 1: found text; expected {"role": "…", "content": "…"}'),
        ({"messages": [{"role": "human", "content": "x"}]}, "message 1: found role 'human'; expected one of system"),
        ({"messages": [{"role": "user", "content": {"x": 1}}]}, 'message 1: "content" is an object; expected text'),
        ({"messages": [{"role": "user", "content": []}]}, 'message 1: "content" is an empty list; expected text'),
        ({"messages": [{"role": "user", "content": None}, CHAT[1]]}, 'message 1: "content" is null; expected text'),
        ({"messages": [{"role": "user", "content": ["x"]}]}, 'message 1: content part 1: found text; expected {"type"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            'message 1: content part 1: found "type": \'image_url\'; expected {"type": "text"',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            '"text" is a number; expected text',
        ),
        ({"messages": [{**CHAT[0], "weight": 0.5}, CHAT[1]]}, 'message 1: found the keys "role", "content", "weight"'),
        ({"messages": [{**CHAT[0], "name": 7}, CHAT[1]]}, 'message 1: "name" is a number; expected text'),
        ({"messages": [{**CHAT[0], "tool_call_id": "c"}]}, "expected it in messages of role 'tool' only, found 'user'"),
        ({"messages": [{"role": "user", "value": "x"}]}, 'message 1: found the keys "role", "value"'),
        ({"messages": CHAT[:1]}, "found no assistant message"),
        ({"messages": CHAT[1:]}, "the first message is the assistant's"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": ""}]}, "message 2: the assistant's answer is empty"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "turn 1: found \"from\": 'bot'; expected one of system"),
        ({"instruction": "x", "output": None}, '"output": found null; expected text'),
        ({"messages": CHAT, "images": ["a.png"]}, 'found "images": a row that was trained without it'),
        ({"prompt": "x", "completion": "y", "system": "s"}, 'found "system" beside "prompt"'),
        (
            {"messages": [{"role": "system", "content": "a"}, *CHAT], "system": "b"},
            'found "system" beside a system message',
        ),
        ({"instruction": "x", "output": "y", "history": [["a", "b"]]}, 'found "history"'),
        ('{"messages": ', "not JSON: Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "x", "prompt": "z", "completion": "y"}', 'found the key "prompt" twice in one object'),
        ('{"prompt": "x", "completion": NaN}', "not JSON: NaN is no number"),
        ('{"prompt": "x \\ud83d", "completion": "y"}', r"found \ud83d, half of a surrogate pair"),
    ],
)
def test_case_6_anything_else_gets_its_line_what_was_found_and_what_is_expected(
    tmp_path: Path, record: Any, found: str
) -> None:
    text = refusal(tmp_path, {"messages": CHAT}, record)
    assert text.startswith(f"{tmp_path / 'data.jsonl'}:2: ")
    assert found in text
    assert "\n" not in text


def test_all_errors_at_once_up_to_a_limit(tmp_path: Path) -> None:
    lines = refusal(tmp_path, *[{"text": "x"}] * 25).splitlines()
    assert [line.split(":")[1] for line in lines[:20]] == [str(n) for n in range(1, 21)]
    assert lines[20:] == ["… and 5 more"]


def test_a_json_array_over_several_lines(tmp_path: Path) -> None:
    first = refusal(tmp_path, json.dumps([{"messages": CHAT}], indent=1)).splitlines()[0]
    assert "found a JSON document over several lines; expected one object on each line" in first


def test_characters_written_as_pairs(tmp_path: Path) -> None:
    assert turns(tmp_path, r'{"prompt": "\ud83d\ude00", "completion": "y"}') == [("\N{GRINNING FACE}", "y")]


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "completion": "y"}')
    with pytest.raises(UserError, match=r"data.jsonl:1: not UTF-8 text \(byte 13\)"):
        read_turns(path)


def test_missing_and_empty_files_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval.file: .*none.jsonl does not exist"):
        read_turns(tmp_path / "none.jsonl", "eval.file")
    assert "is empty; expected one JSON object on each line" in refusal(tmp_path, "", "  ")
    with pytest.raises(UserError, match="cannot be read"):
        read_turns(tmp_path)
