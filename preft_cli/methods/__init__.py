"""The registry of what methods are made of. A new part is a folder beside these and one line here."""

from __future__ import annotations

from preft_cli.methods.base import Part
from preft_cli.methods.direftp import DireftPart
from preft_cli.methods.lorap import LoraPart

# In the order in which they go onto a model: PEFT freezes whatever it does not know, so its LoRA comes first.
_ALL: tuple[Part, ...] = (LoraPart(), DireftPart())

PARTS = {part.name: part for part in _ALL}
"""By the names of `engine_patch.rule.parts`."""


def parts_of(method: str) -> list[Part]:
    """The parts of `method`, in the order in which they go onto a model."""
    from engine_patch.rule import parts

    wanted = parts(method)
    return [part for part in _ALL if part.name in wanted]
