"""LoRA on linear layers: `lorap` on the prompt, `lora` everywhere."""

from __future__ import annotations

from preft_cli.methods.lorap.part import LoraPart

__all__ = ["LoraPart"]
