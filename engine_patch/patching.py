"""Replace one attribute of one vLLM class or module, once, and remember it: the ledger that status reports come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Replacement:
    """`owner.attribute` was `upstream` (None: there was none) and is `ours`."""

    owner: type | ModuleType
    attribute: str
    upstream: Any
    ours: Any


ledger: dict[str, Replacement] = {}
"""Everything replaced in this process, in order, by "module.Class.attribute" or "module.attribute"."""


def replace(owner: type | ModuleType, attribute: str, make: Callable[[Any], Any]) -> None:
    """Set `owner.attribute` to `make(upstream)`, unless this was done before in this process.

    `make` gets the upstream attribute as it is stored in the class (a function, a classmethod object, ...).
    """
    name = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    entry = f"{name}.{attribute}"
    if entry in ledger:
        return
    upstream = owner.__dict__.get(attribute)
    ours = make(upstream)
    setattr(owner, attribute, ours)
    ledger[entry] = Replacement(owner, attribute, upstream, ours)


def put(owner: type | ModuleType, attribute: str, ours: Any) -> None:
    """`replace` where what upstream has is not needed."""
    replace(owner, attribute, lambda upstream: ours)
