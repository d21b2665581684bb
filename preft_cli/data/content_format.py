"""Whether a chat template wants the content of messages as a list of parts.

vLLM looks into the template for a loop over the content and hands it parts if there is one, else text. Templates that know
both can write them differently, so this decides as vLLM does (`vllm/renderers/hf.py`, by the same syntax tree), without
needing vLLM for training.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=8)
def wants_parts(template: str) -> bool:
    """True if `template` loops over the content of messages. False too for one that is no template at all."""
    from jinja2 import TemplateError, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        tree = _compile_jinja_template(template).environment.parse(template)
    except TemplateError:
        return False  # it is reported when the first conversation is rendered
    messages = _names_of_messages(tree)
    in_macros, passed = _macros(tree, messages)
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        if any(_reads(over, name, "content") for name in messages):
            return isinstance(loop.target, nodes.Name)  # vLLM gives up on a loop over pairs
        if isinstance(over, nodes.Name):
            names = passed.get(id(loop), set()) if id(loop) in in_macros else {"content"}
            if over.name in names:
                return True
    return False


def _names_of_messages(tree: Any) -> set[str]:
    """Variables that stand for one message: of loops over `messages`, or over a variable that was set to them."""
    from jinja2 import nodes

    lists, found = ["messages"], 0
    while found < len(lists):
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in lists and _reads(assign.node, lists[found]):
                lists.append(target.name)
        found += 1
    return {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in lists)
    }


def _macros(tree: Any, messages: set[str]) -> tuple[set[int], dict[int, set[str]]]:
    """The loops inside of macros, and for each the parameters that some call gives a message's content to."""
    from jinja2 import nodes

    loops: set[int] = set()
    passed: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        names = {name for call in tree.find_all(nodes.Call) for name in _content_parameters(macro, call, messages)}
        for loop in macro.find_all(nodes.For):
            loops.add(id(loop))
            if names:
                passed[id(loop)] = names
    return loops, passed


def _content_parameters(macro: Any, call: Any, messages: set[str]) -> Iterator[str]:
    from jinja2 import nodes

    if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
        return
    parameters = [argument.name for argument in macro.args]
    given = [*zip(parameters, call.args, strict=False), *((word.key, word.value) for word in call.kwargs)]
    for name, value in given:
        if name in parameters and any(_reads(value, message, "content") for message in messages):
            yield name


def _reads(node: Any, variable: str, key: str | None = None) -> bool:
    """Whether `node` is `variable` (or its `key`), perhaps filtered, tested or sliced."""
    from jinja2 import nodes

    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _reads(node.node, variable, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, variable, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _reads_name(node.node, variable)
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads_name(node.node, variable)


def _reads_name(node: Any, variable: str) -> bool:
    return bool(getattr(node, "name", None) == variable and getattr(node, "ctx", None) == "load")
