"""Where the final answer stands in a text."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def behind_hashes(text: str) -> str | None:
    """`18` of `... #### 18`: the rest of the line behind the last ####, as GSM8K writes it."""
    _, found, rest = text.rpartition("####")
    return (rest.strip().partition("\n")[0].strip() or None) if found else None


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{…} that is closed, braces in it matched."""
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        depth = 1
        for end in range(start, len(text)):
            if text[end] in "{}" and text[end - 1] != "\\":
                depth += 1 if text[end] == "{" else -1
            if depth == 0:
                return text[start:end].strip() or None
    return None


def tagged(text: str) -> str:
    """What stands in the last <answer>…</answer>, or all of the text; stripped."""
    found = _TAGGED.findall(text)
    return str(found[-1]).strip() if found else text.strip()


def python_code(text: str) -> str:
    """The last ```python block, else the last block of any kind, else all of the text. A cut block reaches to the end."""
    blocks = [(language.lower(), code) for language, code in _BLOCK.findall(text)]
    python = [code for language, code in blocks if language in ("python", "py", "python3")]
    return str((python or [code for _, code in blocks] or [text])[-1])
