"""Which linear layers LoRA acts on."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

from preft_cli.errors import UserError

if TYPE_CHECKING:
    from preft_cli.config.schema import AdapterConfig


def target_modules(config: AdapterConfig, linear: Iterable[str]) -> list[str]:
    """Full names of the layers to adapt. `q_proj` names it in every layer; `layers.0.self_attn.q_proj` in one.

    Raises:
        UserError: for a name that matches no linear layer, with the nearest one.
    """
    names = list(linear)
    if config.target_modules == "all-linear":
        return names
    wanted = {target: [name for name in names if f".{name}".endswith(f".{target}")] for target in config.target_modules}
    known = sorted({name.rpartition(".")[2] for name in names})
    for target, matches in wanted.items():
        if not matches:
            near = get_close_matches(target, known, n=1)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise UserError(
                f"adapter.target_modules: {target!r} matches no linear layer of the base model; "
                f"known: {', '.join(known)}, or all-linear.{meant}",
                exit_code=2,
            )
    if not wanted:
        raise UserError("adapter.target_modules: the list is empty; name layers, or use all-linear", exit_code=2)
    chosen = {name for matches in wanted.values() for name in matches}
    return [name for name in names if name in chosen]
