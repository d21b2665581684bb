"""Training data: JSONL in, token ids with the prompt boundary out."""

from __future__ import annotations

from preft_cli.data.read import read_turns
from preft_cli.data.turn import Message, Row, Turn

__all__ = ["Message", "Row", "Turn", "read_turns"]
