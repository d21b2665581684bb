"""A random Llama of a few thousand weights with a real tokenizer and chat template, saved as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen2.5's and Hermes's templates do it.
TOOL_CHATML = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Trained on this, the tokenizer merges "bar" and "foo": boundaries can split a token.
CORPUS = ["foo bar", "foo bar baz", "hello world, how are you today?", "system user assistant"] * 20


def tiny_tokenizer(template: str | None = CHATML, *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 300 tokens; `adds_bos` as Llama's tokenizer does."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "<|turn_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=template,
    )


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """Hidden size 64, 2 layers, grouped-query attention; random weights large enough to make tokens matter."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.1,
            bos_token_id=3,
            eos_token_id=2,
            pad_token_id=2,
        )
    ).eval()


def save_tiny(folder: Path, **tokenizer_options: Any) -> Path:
    """A folder that `model.base` can name."""
    tiny_model().save_pretrained(folder)
    tiny_tokenizer(**tokenizer_options).save_pretrained(folder)
    return folder
