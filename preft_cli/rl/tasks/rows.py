"""One data row to one problem.

    {"messages": [{"role": "user", "content": "x"}], "answer": "18"}       a chat; an answer at its end is left out
    {"prompt": [{"role": "user", "content": "x"}], "answer": "18"}         the same
    {"prompt": "x", "answer": "18"}                                        plain text, no chat, as for sft
    {"question": "x", "answer": "9 + 9 = 18\\n#### 18"}                    GSM8K: a chat
    {"problem": "x", "solution": "so it is \\\\boxed{18}"}                 MATH: a chat
    {"text": "x", "test_list": ["assert f(1) == 2"]}                       MBPP: a chat
    {"prompt": "def f(x): ...", "test": "...", "entry_point": "f"}         HumanEval: a chat

All other fields stay in the record, for rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from preft_cli.data.formats import UNREAD
from preft_cli.data.found import FormatError, keys, kind
from preft_cli.data.messages import read_message
from preft_cli.data.read import Form
from preft_cli.data.turn import Message
from preft_cli.rl.problem import Problem, Prompt
from preft_cli.rl.text import behind_hashes, boxed

EXPECTED = (
    '{"messages": …, "answer": …}, {"prompt": …, "answer": …}, or rows of GSM8K (question, answer), MATH (problem, solution), '
    "MBPP (text, test_list) or HumanEval (prompt, test, entry_point)"
)
IN_A_BOX = "Put your final answer within \\boxed{}."
IN_A_BLOCK = "Answer with the code in one ```python block."


def problem_of(record: Any, where: str) -> list[Problem]:
    """The problem that `record` poses, whether or not it says enough to judge answers.

    Raises:
        FormatError: it poses none.
    """
    if not isinstance(record, dict):
        raise FormatError(f"found {kind(record)}; expected {EXPECTED}")
    for name in (*UNREAD, "tools", "system"):
        if record.get(name):
            raise FormatError(f'found "{name}": a row that was trained without it would not be the one you wrote')
    return [Problem(_asked(record), _with_answer(record), where)]


def _asked(record: dict[str, Any]) -> Prompt:
    """A chat that is written out, else what the form asks."""
    for key in ("messages", "prompt"):
        if (key == "messages" and record.get(key) is not None) or isinstance(record.get(key), list):
            return _chat(record[key], key)
    ask = next((ask for names, ask in FORMS if all(record.get(name) is not None for name in names)), None)
    if ask is None:
        raise FormatError(f"found {keys(record)}; expected {EXPECTED}")
    return ask(record)


PROBLEMS = Form(EXPECTED, "a problem needs what its answers are judged by; write JSONL", problem_of)


def _chat(found: Any, key: str) -> Prompt:
    """The messages up to the last one of the user: answers behind it are what is to be found."""
    if not isinstance(found, list) or not found:
        raise FormatError(f'"{key}": found {kind(found)}; expected a list of messages')
    messages = [read_message(message, number) for number, message in enumerate(found, start=1)]
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages or messages[-1].role != "user":
        found = f"a message of role {messages[-1].role!r} at the end" if messages else "no message of the user"
        raise FormatError(f'"{key}": found {found}; expected one of the user')
    return tuple(messages)


def _human_eval(record: dict[str, Any]) -> Prompt:
    stub = _text(record, "prompt")
    return _user(f"Complete this function.\n\n```python\n{stub.rstrip()}\n```\n\n{IN_A_BLOCK}")


def _mbpp(record: dict[str, Any]) -> Prompt:
    asked = _text(record, "text" if record.get("text") is not None else "prompt")
    tests = record["test_list"]
    shown = "\n".join(map(str, tests)) if isinstance(tests, list) else str(tests)
    return _user(f"{asked}\n\nThe code must pass these tests:\n\n```python\n{shown}\n```\n\n{IN_A_BLOCK}")


def _gsm8k(record: dict[str, Any]) -> Prompt:
    return _user(f"{_text(record, 'question')}\n\n{IN_A_BOX}")


def _math(record: dict[str, Any]) -> Prompt:
    return _user(f"{_text(record, 'problem')}\n\n{IN_A_BOX}")


def _user(text: str) -> Prompt:
    return (Message("user", text),)


def _text(record: dict[str, Any], key: str) -> str:
    found = record[key]
    if not isinstance(found, str):
        raise FormatError(f'"{key}": found {kind(found)}; expected text')
    if not found.strip():
        raise FormatError(f'"{key}" is empty')
    return found


FORMS: tuple[tuple[tuple[str, ...], Callable[[dict[str, Any]], Prompt]], ...] = (
    (("prompt", "test", "entry_point"), _human_eval),
    (("text", "test_list"), _mbpp),
    (("prompt", "test_list"), _mbpp),
    (("question",), _gsm8k),
    (("problem",), _math),
    (("prompt",), lambda record: _text(record, "prompt")),
)
"""The columns that tell a form apart, and what it asks. Those of question sets are more telling than `prompt`."""


def _with_answer(record: dict[str, Any]) -> dict[str, Any]:
    """With the final answer alone in `answer`, where the row has it behind #### or in the \\boxed{} of its solution."""
    answer, solution = record.get("answer"), record.get("solution")
    if isinstance(answer, str) and (final := behind_hashes(answer)) is not None:
        return {
            "solution": answer,
            **{key: value for key, value in record.items() if value is not None},
            "answer": final,
        }
    if answer is None and isinstance(solution, str):
        final = boxed(solution)
        return record if final is None else {**record, "answer": final}
    return record
