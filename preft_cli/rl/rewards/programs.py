"""Tests of a code problem, as question sets write them."""

from __future__ import annotations

import re
from typing import Any


def has_tests(record: dict[str, Any]) -> bool:
    """Whether there is something to run."""
    return bool(code_tests(record))


def code_tests(record: dict[str, Any]) -> list[str]:
    """The tests, each of them code; empty if there are none, or one of them is no text."""
    for key in ("tests", "test_list"):
        found = record.get(key)
        if isinstance(found, str) and found.strip():
            return [found]
        if isinstance(found, list) and found and all(isinstance(test, str) and test.strip() for test in found):
            return found
    found, entry = record.get("test"), record.get("entry_point")
    if isinstance(found, str) and found.strip():
        # HumanEval's define `check`, which somebody has to call.
        called = f"\ncheck({entry})\n" if entry and re.search(r"^def check\(", found, re.MULTILINE) else ""
        return [found + called]
    return []


def setup_of(record: dict[str, Any]) -> str:
    """Code that the tests of MBPP need before them."""
    lines: list[str] = []
    for key in ("test_imports", "test_setup_code"):
        found = record.get(key) or []
        lines += [found] if isinstance(found, str) else [str(line) for line in found]
    return "\n".join(lines)


def whole_program(record: dict[str, Any], code: str) -> str:
    """`code`, with what stands around it in a problem that gives the beginning of a function (HumanEval).

    An answer that writes the whole function needs the imports and helpers above it; one that goes on where the prompt ends
    needs all of it.
    """
    stub, entry = record.get("prompt"), record.get("entry_point")
    if not isinstance(stub, str) or not isinstance(entry, str) or "test_list" in record:
        return code
    head = re.compile(rf"^def {re.escape(entry)}\b", re.MULTILINE)
    start = head.search(stub)
    if start is None:
        return code
    return f"{stub[: start.start()]}\n{code}" if head.search(code) else stub + code
