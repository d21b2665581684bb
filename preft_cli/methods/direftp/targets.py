"""Which residual streams DiReFT acts on. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_patch.residual import block_of
from preft_cli.errors import UserError

if TYPE_CHECKING:
    from preft_cli.adapters.base import BaseFacts
    from preft_cli.config.schema import AdapterConfig


def streams(config: AdapterConfig, base: BaseFacts) -> list[str]:
    """Names of the streams behind `adapter.layers`, in the model's order; a layer named twice counts once.

    Raises:
        UserError: the base model's streams are not known, it has no such layer, or W2 cannot be orthogonal.
    """
    base.require_streams(f"adapter.method: {config.method}", exit_code=2)
    by_layer = {layer_of(name): name for name in base.streams}
    chosen = set(by_layer) if config.layers == "all" else set(config.layers)
    if beyond := sorted(chosen - by_layer.keys()):
        raise UserError(
            f"adapter.layers: {base.name} has no layer {', '.join(map(str, beyond))}; it has {len(by_layer)} decoder "
            f"layers, {min(by_layer)} to {max(by_layer)}",
            exit_code=2,
        )
    width, rank = base.streams[by_layer[min(chosen)]][0], direft_rank(config)
    if config.orthogonal and rank > width:
        raise UserError(
            f"adapter.orthogonal: {rank} rows of {base.name}'s width {width} cannot be orthogonal to each other; lower "
            "adapter.rank or adapter.direft_rank",
            exit_code=2,
        )
    return [name for layer, name in by_layer.items() if layer in chosen]


def direft_rank(config: AdapterConfig) -> int:
    """The rank of the DiReFT part."""
    return config.direft_rank or config.rank


def layer_of(stream: str) -> int:
    """`model.layers.3.residual` -> 3."""
    return int(block_of(stream).rpartition(".")[2])
