"""Ask every model of a running server the same question: `python examples/ask.py URL "question" [MODEL ...]`.

Nothing but the OpenAI chat API, by the standard library. Prints one line a model; `--expect TEXT` after a model's name
makes the script fail unless that model's answer contains TEXT.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from typing import Any


def call(url: str, payload: dict[str, Any] | None = None) -> Any:
    """GET, or POST `payload` as JSON."""
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def ask(url: str, model: str, question: str) -> str:
    """The greedy answer of `model`, at most 48 tokens."""
    messages = [{"role": "user", "content": question}]
    payload = {"model": model, "messages": messages, "max_tokens": 48, "temperature": 0}
    return str(call(f"{url}/v1/chat/completions", payload)["choices"][0]["message"]["content"]).strip()


def main() -> int:
    """Ask, print, and compare with what was expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("question")
    parser.add_argument("models", nargs="*", help="default: all that the server lists")
    parser.add_argument("--expect", action="append", default=[], metavar="MODEL=TEXT")
    args = parser.parse_args()
    models = args.models or [card["id"] for card in call(f"{args.url}/v1/models")["data"]]
    expected = dict(item.split("=", 1) for item in args.expect)
    failed = False
    print(f"question: {args.question}")
    for model in models:
        answer = ask(args.url, model, args.question)
        print(f"  {model:>14}: {' / '.join(answer.splitlines())}")
        if expected.get(model, "") not in answer:
            print(f"error: {model} was expected to say {expected[model]!r}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
