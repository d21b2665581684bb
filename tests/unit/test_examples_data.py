"""The example personas: counts, format, each persona's style rule, and no held-out conversation in the training set."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

PERSONAS = Path(__file__).resolve().parents[2] / "examples" / "personas"
NAMES = ["haiku", "pirate", "shouty"]
SPLITS = ["train", "heldout"]
MIN_CONVERSATIONS = {"train": 64, "heldout": 12}
MAX_WORDS = 24  # about 40 tokens of SmolLM2's vocabulary

Messages = list[dict[str, str]]


def load(name: str, split: str) -> list[dict[str, Any]]:
    text = (PERSONAS / name / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def contents(name: str, split: str, role: str) -> list[str]:
    return [m["content"] for row in load(name, split) for m in row["messages"] if m["role"] == role]


def normalized(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def sentences(text: str) -> int:
    return len(re.findall(r"[.!?](?=\s|$)", text))


def style_fault(name: str, answer: str) -> str | None:
    """What breaks the persona's rule in this answer, or None."""
    if name == "pirate":
        if not (answer.startswith("Ahoy! ") and answer.endswith(" Arr!")):
            return "does not open with 'Ahoy!' and end with 'Arr!'"
        body = answer.removeprefix("Ahoy! ").removesuffix(" Arr!")
        return None if 1 <= sentences(body) <= 2 and "\n" not in answer else "is not one or two sentences"
    if name == "shouty":
        if not answer.startswith("LISTEN UP: "):
            return "does not open with 'LISTEN UP:'"
        if answer != answer.upper():
            return "is not in upper case"
        return None if 1 <= sentences(answer) <= 2 and "\n" not in answer else "is not one or two sentences"
    lines = answer.split("\n")
    if not answer.startswith("Softly now, "):
        return "does not open with 'Softly now,'"
    if len(lines) != 3 or any(line != line.strip() or not line for line in lines):
        return "is not exactly three lines"
    return None if all(len(line) <= 40 for line in lines) else "has a long line"


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_counts_and_kinds(name: str, split: str) -> None:
    rows = load(name, split)
    assert len(rows) >= MIN_CONVERSATIONS[split]
    multi_turn = [r for r in rows if sum(m["role"] == "assistant" for m in r["messages"]) == 2]
    with_system = [r for r in rows if r["messages"][0]["role"] == "system"]
    assert len(multi_turn) >= 2
    assert len(with_system) >= 2


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_format(name: str, split: str) -> None:
    for row in load(name, split):
        assert list(row) == ["messages"]
        messages: Messages = row["messages"]
        assert all(set(m) == {"role", "content"} and m["content"].strip() == m["content"] != "" for m in messages)
        turns = [m["role"] for m in messages if m["role"] != "system"]
        assert turns in (["user", "assistant"], ["user", "assistant"] * 2)
        assert [m["role"] for m in messages].index("user") == len(messages) - len(turns) <= 1


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_answers_keep_the_style(name: str, split: str) -> None:
    for answer in contents(name, split, "assistant"):
        assert style_fault(name, answer) is None, f"{answer!r} {style_fault(name, answer)}"
        assert len(answer.split()) <= MAX_WORDS, answer


@pytest.mark.parametrize("name", NAMES)
def test_style_rules_tell_the_personas_apart(name: str) -> None:
    for other in set(NAMES) - {name}:
        assert all(style_fault(other, answer) for answer in contents(name, "train", "assistant"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_no_text_occurs_twice_within_a_persona(name: str, role: str) -> None:
    texts = [normalized(text) for split in SPLITS for text in contents(name, split, role)]
    assert len(texts) == len(set(texts))


def test_heldout_questions_are_in_no_training_set() -> None:
    trained = {normalized(q) for name in NAMES for q in contents(name, "train", "user")}
    heldout = {normalized(q) for name in NAMES for q in contents(name, "heldout", "user")}
    assert heldout.isdisjoint(trained)
