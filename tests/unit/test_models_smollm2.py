"""The built-in base model as it comes out of its package."""

from __future__ import annotations

import pytest

from preft_cli.data import Message
from preft_cli.data.load import load_tokenizer
from preft_cli.data.template import load_template
from preft_cli.data.tokenise import prompt_token_ids
from preft_cli.models import BaseModel, modules_of, resolve


@pytest.fixture(scope="module")
def base() -> BaseModel:
    """Unpacked into the user's cache on first use."""
    return resolve("smollm2-135m")


def test_shape_is_the_published_one(base: BaseModel) -> None:
    published = resolve("random:smollm2-135m")
    assert modules_of(base).linear == modules_of(published).linear
    assert base.fingerprint.mismatch(published.fingerprint) is None
    assert base.fingerprint.weights is not None
    for key in ("rope_parameters", "tie_word_embeddings", "max_position_embeddings", "eos_token_id"):
        assert getattr(base.hf_config, key) == getattr(published.hf_config, key)


def test_chat_template_and_end_of_turn(base: BaseModel) -> None:
    tokenizer = load_tokenizer(base)
    template = load_template(tokenizer, base.path, None)
    assert tokenizer.decode([template.end_of_turn_id]) == tokenizer.eos_token == "<|im_end|>"
    ids = prompt_token_ids((Message("user", "Hi"),), tokenizer, template)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
