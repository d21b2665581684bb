"""Replace one attribute of one vLLM class or module, once, and remember it: the ledger that status reports come from."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

# "module.Class.attribute" or "module.attribute" of everything replaced in this process, in order.
ledger: list[str] = []


def replace(owner: type | ModuleType, attribute: str, make: Callable[[Any], Any]) -> None:
    """Set `owner.attribute` to `make(upstream)`, unless this was done before in this process.

    `make` gets the upstream attribute as it is stored in the class (a function, a classmethod object, ...).
    """
    name = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    entry = f"{name}.{attribute}"
    if entry in ledger:
        return
    upstream = owner.__dict__.get(attribute)
    setattr(owner, attribute, make(upstream))
    ledger.append(entry)
