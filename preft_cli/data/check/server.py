"""The ids that vLLM's server computes for a request, from its own code without an engine.

Requests go the server's whole way: its check of the body, the clean-up of messages and tools, the template, the tokenizer.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from preft_cli.data.request import request
from preft_cli.data.turn import Turn


class ServerPrompts:
    """vLLM's front end for one base model, as `preft serve` starts it."""

    def __init__(self, folder: Path, chat_template: Path | None, options: dict[str, Any] | None = None) -> None:
        """`options`: those of `serve.vllm_args` that change prompts, by vLLM's names."""
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.config import ModelConfig, VllmConfig
        from vllm.renderers import renderer_from_config
        from vllm.renderers.chat_utils import load_chat_template
        from vllm.renderers.online_renderer import OnlineRenderer

        options = options or {}
        model = ModelConfig(model=str(folder))
        self._front = OnlineRenderer(
            model,
            renderer_from_config(VllmConfig(model_config=model)),
            request_logger=None,
            chat_template=load_chat_template(str(chat_template)) if chat_template else None,
            chat_template_content_format=options.get("chat-template-content-format", "auto"),
            default_chat_template_kwargs=options.get("default-chat-template-kwargs"),
        )

    def ids(self, turn: Turn) -> list[int] | str:
        """The prompt ids of the request that asks for the answer of `turn`; or why the server refuses it."""
        return asyncio.run(self._ask(turn))

    async def _ask(self, turn: Turn) -> list[int] | str:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        try:
            if isinstance(turn.prompt, str):
                prompts = await self._front.render_completion(CompletionRequest(prompt=turn.prompt, max_tokens=1))
            else:
                body = ChatCompletionRequest.model_validate(request(turn.prompt, turn.tools))
                found = await self._front.render_chat(body)
                prompts = found[1] if isinstance(found, tuple) else found
        except Exception as error:
            # Of the request's model, the template or the tokenizer: the server answers with it.
            return str(error)
        return list(prompts[0]["prompt_token_ids"]) if isinstance(prompts, list) else str(prompts.error.message)
