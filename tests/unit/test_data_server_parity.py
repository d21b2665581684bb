"""Prompt ids of training against vLLM's own front end, for the endpoints' default parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft_cli.data import Message, Turn
from preft_cli.data.content_format import wants_parts
from preft_cli.data.template import load_template
from preft_cli.data.tokenise import prompt_token_ids
from preft_cli.data.turn import ToolCall
from tests.unit.tiny import CHATML, TOOL_CHATML, save_tiny

pytest.importorskip("vllm")

THINKING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
# The server hands such a template the content as a list of parts instead of text.
PARTS = CHATML.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}TEXT {{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}",
)
# Everything that a template is given, in its order.
DUMP = (
    "{{ messages | tojson }}{{ tools | tojson if tools is defined else '-' }}{{ documents is defined }}"
    "{{ reasoning_effort is defined }}{{ continue_final_message is defined }}{{ add_generation_prompt }}"
)
DUMP_PARTS = "{% for m in messages %}{% for part in m.content %}.{% endfor %}{% endfor %}" + DUMP
CHAT = (
    Message("system", "be nice"),
    Message("user", "foo ba"),
    Message("assistant", " r\n\n x "),
    Message("user", "hello\tworld "),
)
TOOLS = (
    {"type": "function", "function": {"parameters": {"z": {}, "a": None}, "name": "foo", "more": 1}, "more": 2},
    {"function": {"strict": True, "name": "bar", "description": "hello"}},
)
TOOL_CHAT = (
    Message("system", "x-anthropic-billing-header: 1\nbe nice"),
    Message("system", ("x-anthropic-billing-header: 1", "be", "", "nice")),
    Message("user", ("foo", "", "bar"), name="bob"),
    Message("assistant", (), (ToolCall("foo", {"z": "hellö", "a": [1, None]}, "c1"), ToolCall("bar", {}, "c2"))),
    Message("tool", ("baz", "", "foo"), tool_call_id="c1", name="foo"),
    Message("tool", "bar", tool_call_id="c2"),
    Message("assistant", "", (ToolCall("foo", {}, "c3"),)),
    Message("tool", "", tool_call_id="c3"),
)


def model(folder: Path, template: str, adds_bos: bool = False) -> Path:
    """With room for long prompts, which the server would refuse otherwise."""
    save_tiny(folder, template=template, adds_bos=adds_bos)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


@pytest.mark.parametrize(
    ("template", "adds_bos"),
    [
        (CHATML, False), (CHATML, True), (THINKING, False), (PARTS, False), ("{{ bos_token }}" + CHATML, True),
        (TOOL_CHATML, False), (DUMP, False), (DUMP_PARTS, False),
    ],
    ids=["plain", "tokenizer-adds-bos", "thinking", "content-parts", "both-write-bos", "tools", "all", "all-parts"],
)  # fmt: skip
def test_prompt_ids_are_the_servers(tmp_path: Path, template: str, adds_bos: bool) -> None:
    """Cases 3, 4 and 7: boundaries inside of tokens, generation prompts with text of their own, one BOS."""
    from preft_cli.data.check.server import ServerPrompts
    from preft_cli.data.load import load_tokenizer
    from preft_cli.models import BaseModel

    server = ServerPrompts(model(tmp_path, template, adds_bos), None)
    tokenizer = load_tokenizer(BaseModel("tiny", tmp_path))
    own = load_template(tokenizer, tmp_path, None)
    turns = [
        Turn(CHAT, "", ""),
        Turn("foo ba", "r", ""),
        Turn(CHAT, "", "", TOOLS),
        Turn(TOOL_CHAT, "", "", TOOLS),
        Turn(TOOL_CHAT[1:], "", ""),
    ]
    for turn in turns:
        assert prompt_token_ids(turn.prompt, tokenizer, own, tools=turn.tools) == server.ids(turn)


def test_what_the_server_refuses_is_told(tmp_path: Path) -> None:
    from preft_cli.data.check.server import ServerPrompts

    server = ServerPrompts(model(tmp_path, "{{ raise_exception('no, thanks') }}"), None)
    assert "no, thanks" in str(server.ids(Turn(CHAT, "", "")))
    assert "name" in str(server.ids(Turn(CHAT, "", "", ({"function": {}},))))


LOOPS: dict[str, Any] = {
    "filtered": "{% for m in messages[1:] %}{% for c in m.content | list %}{% endfor %}{% endfor %}",
    "assigned": "{% set ms = messages[1:] %}{% set more = ms %}"
    "{% for m in more %}{% for c in m['content'] %}{% endfor %}{% endfor %}",
    "named": "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}",
    "macro": "{% macro f(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
    "macro-keyword": "{% macro f(a, x) %}{% for c in x %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ f(1, x=m.content) }}{% endfor %}",
    "macro-of-others": "{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ f(m.role) }}{{ m.content }}{% endfor %}",
    "other-key": "{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}",
    "other-list": "{% for m in tools %}{% for c in m.content %}{% endfor %}{% endfor %}",
    "tuple": "{% for m in messages %}{% for k, v in m.content | items %}{% endfor %}{% endfor %}",
    "broken": "{% for m in messages %}",
}


@pytest.mark.parametrize("template", [*LOOPS.values(), CHATML, PARTS, TOOL_CHATML], ids=[*LOOPS, "a", "b", "c"])
def test_content_is_a_list_of_parts_where_vllm_says_so(template: str) -> None:
    from vllm.renderers.hf import _detect_content_format

    assert wants_parts(template) == (_detect_content_format(template, default="string") == "openai")
