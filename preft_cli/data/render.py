"""Chats to text by the chat template, as the server renders them; and the text of an answer that calls tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from preft_cli.data.request import template_messages, template_tools
from preft_cli.data.template import ChatTemplate
from preft_cli.data.turn import Message, Turn
from preft_cli.errors import UserError


def render(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    tokenizer: Any,
    template: ChatTemplate,
    where: str,
    *,
    answer_follows: bool = True,
) -> str:
    """The text of `messages`, with the generation prompt if an answer follows.

    Raises:
        UserError: there is no template, or it refuses the conversation.
    """
    if template.text is None:
        raise UserError(
            f"{where}: the base model's tokenizer has no chat template. Set model.chat_template, or train on "
            '{"prompt": …, "completion": …} records.'
        )
    try:
        rendered = tokenizer.apply_chat_template(
            template_messages(messages, parts=template.parts),
            tools=template_tools(tools),
            chat_template=template.text_for(tools),
            add_generation_prompt=answer_follows,
            tokenize=False,
        )
    except Exception as error:
        # Whatever the template raises, and what Jinja raises for a template that expects other messages.
        raise UserError(f"{where}: the chat template refuses this conversation: {error}") from error
    return str(rendered)


def unseen(turn: Turn, tokenizer: Any, template: ChatTemplate) -> list[str]:
    """What of tools the prompt of `turn` has and the template leaves out in silence: definitions, calls, results."""
    if isinstance(turn.prompt, str):
        return []
    without: dict[str, tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]] = {}
    if turn.tools:
        without['"tools"'] = (turn.prompt, ())
    if any(message.tool_calls for message in turn.prompt):
        without['"tool_calls"'] = (tuple(message._replace(tool_calls=()) for message in turn.prompt), turn.tools)
    if any(message.role == "tool" for message in turn.prompt):
        without["messages of role tool"] = (tuple(one for one in turn.prompt if one.role != "tool"), turn.tools)
    full = render(turn.prompt, turn.tools, tokenizer, template, turn.where) if without else None
    return [key for key, chat in without.items() if _render_or_none(*chat, tokenizer, template) == full]


def _render_or_none(
    messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...], tokenizer: Any, template: ChatTemplate
) -> str | None:
    try:
        return render(messages, tools, tokenizer, template, "")
    except UserError:
        return None  # it misses them


def answer_with_calls(turn: Turn, answer: Message, tokenizer: Any, template: ChatTemplate) -> tuple[str, int]:
    """What the template writes for an answer that calls tools: the text after the prompt, and the id that ends it.

    Raises:
        UserError: the template does not write such answers, or not after the prompt that the server computes.
    """
    before = turn.prompt
    assert not isinstance(before, str), "calls of tools are a chat's"
    prompt = render(before, turn.tools, tokenizer, template, turn.where)

    def after_prompt(message: Message) -> str:
        whole = render((*before, message), turn.tools, tokenizer, template, turn.where, answer_follows=False)
        if not whole.startswith(prompt):
            raise UserError(
                f"{turn.where}: the chat template writes a conversation with tool calls otherwise than its own prompt for "
                f"them begins, so that the answer's text is not known; the prompt ends with {prompt[-40:]!r}. Write the "
                'call as the text of the answer\'s "content", or set a model.chat_template that does without.'
            )
        return whole[len(prompt) :]

    written = after_prompt(answer)
    if written == _after_or_none(after_prompt, answer._replace(tool_calls=())):
        raise UserError(f'{turn.where}: the chat template leaves out "tool_calls": there is nothing of them to learn')
    return _split_end(written, turn.where, tokenizer, template)


def _after_or_none(after_prompt: Callable[[Message], str], message: Message) -> str | None:
    try:
        return after_prompt(message)
    except UserError:
        return None


def _split_end(written: str, where: str, tokenizer: Any, template: ChatTemplate) -> tuple[str, int]:
    """The text before the end of the turn that the template wrote, and the id of that end."""
    text, end_id = written.rstrip(), template.end_of_turn_id
    tokens = {id_: tokenizer.convert_ids_to_tokens(id_) for id_ in sorted(template.stop_ids | {end_id})}
    stops = {id_: token for id_, token in tokens.items() if token}  # a config may name ids that the tokenizer lacks
    for id_, stop in stops.items():
        if text.endswith(stop):
            text, end_id = text.removesuffix(stop), id_
            break
    if inside := [stop for stop in stops.values() if stop in text]:
        raise UserError(
            f"{where}: the chat template writes {inside[0]} in the middle of the answer's tool calls, where a server stops"
        )
    return text, end_id
