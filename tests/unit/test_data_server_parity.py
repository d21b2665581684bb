"""Prompt ids of training against vLLM's own renderer, for the endpoints' default parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from preft_cli.data import Message
from preft_cli.data.template import load_template
from preft_cli.data.tokenise import prompt_token_ids
from tests.unit.tiny import CHATML, save_tiny

pytest.importorskip("vllm")

THINKING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
# The server hands such a template the content as a list of parts instead of text.
PARTS = CHATML.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}",
)
CHAT = (
    Message("system", "be nice"),
    Message("user", "foo ba"),
    Message("assistant", " r\n\n x "),
    Message("user", "hello\tworld "),
)


def server(folder: Path) -> Any:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.renderers import renderer_from_config

    return renderer_from_config(VllmConfig(model_config=ModelConfig(model=str(folder))))


@pytest.mark.parametrize(
    ("template", "adds_bos"),
    [(CHATML, False), (CHATML, True), (THINKING, False), (PARTS, False), ("{{ bos_token }}" + CHATML, True)],
    ids=["plain", "tokenizer-adds-bos", "thinking", "content-parts", "both-write-bos"],
)
def test_prompt_ids_are_the_servers(tmp_path: Path, template: str, adds_bos: bool) -> None:
    from vllm.renderers.params import ChatParams

    renderer = server(save_tiny(tmp_path, template=template, adds_bos=adds_bos))
    tokenizer = renderer.get_tokenizer()
    own = load_template(tokenizer, tmp_path, None)

    params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
    _, rendered = renderer.render_messages([message._asdict() for message in CHAT], params)
    (chat,) = renderer.tokenize_prompts([rendered], renderer.default_chat_tok_params)
    assert prompt_token_ids(CHAT, tokenizer, own) == chat["prompt_token_ids"]

    (text,) = renderer.tokenize_prompts([{"prompt": "foo ba"}], renderer.default_cmpl_tok_params)
    assert prompt_token_ids("foo ba", tokenizer, own) == text["prompt_token_ids"]
