"""DiReFT on the residual stream: `direftp` on the prompt, `direft` everywhere (Wu et al. 2024, arXiv 2404.03592)."""

from __future__ import annotations

from preft_cli.methods.direftp.part import DireftPart

__all__ = ["DireftPart"]
