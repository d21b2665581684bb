"""Interventions as named tensors, and back, checked.

model.layers.3.residual.w1  [rank, hidden]        .w2  [rank, hidden]        .b  [rank]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from engine_patch.adapter import LowRankPair
from preft_cli.adapters.base import BaseFacts
from preft_cli.errors import UserError
from preft_cli.methods.direftp.targets import layer_of

PARTS = ("w1", "w2", "b")


def to_tensors(pairs: Mapping[str, LowRankPair]) -> dict[str, torch.Tensor]:
    """The interventions under their names, contiguous, in their own dtype."""
    tensors = {}
    for stream, pair in pairs.items():
        for part, tensor in zip(PARTS, (pair.a, pair.b.T, pair.bias), strict=True):
            if tensor is not None:  # an `Adapter` has seen to that
                tensors[f"{stream}.{part}"] = tensor.detach().cpu().contiguous()
    return tensors


def to_pairs(tensors: Mapping[str, torch.Tensor], rank: int, where: Path) -> dict[str, LowRankPair]:
    """The inverse of `to_tensors`.

    Raises:
        UserError: an unknown tensor, a missing one, another rank than the config says, or values that are not finite.
            `where` names the file in errors.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name in sorted(tensors):
        stream, _, part = name.rpartition(".")
        if part not in PARTS:
            raise UserError(f"{where}: unknown tensor {name}: an intervention has {', '.join(PARTS)} and no others")
        found.setdefault(stream, {})[part] = tensors[name]
    return {stream: _pair(stream, parts, rank, where) for stream, parts in found.items()}


def _pair(stream: str, parts: Mapping[str, torch.Tensor], rank: int, where: Path) -> LowRankPair:
    for part in PARTS:
        if part not in parts:
            raise UserError(f"{where}: tensor {stream}.{part} is missing; save the adapter again")
    w1, w2, b = (parts[part] for part in PARTS)
    if w1.ndim != 2 or w1.shape[0] != rank or w2.shape != w1.shape or list(b.shape) != [rank]:
        raise UserError(
            f"{where}: {stream} has w1 of shape {list(w1.shape)}, w2 of shape {list(w2.shape)} and b of shape "
            f"{list(b.shape)}, but its config says rank {rank}: [{rank}, hidden] twice, and [{rank}]"
        )
    if not all(torch.isfinite(tensor).all() for tensor in (w1, w2, b)):
        raise UserError(f"{where}: {stream} holds NaN or infinite values; the training diverged, use an earlier state")
    return LowRankPair(w1, w2.T, 1.0, b)


def check_complete(pairs: Mapping[str, LowRankPair], layers: Iterable[int], base: BaseFacts, where: Path) -> None:
    """Refuse interventions that are not those behind `layers` of `base`.

    Raises:
        UserError: a layer that the base model has not, missing ones, or others.
    """
    by_layer, wanted = {layer_of(name): name for name in base.streams}, set(layers)
    if beyond := sorted(wanted - by_layer.keys()):
        raise UserError(
            f"{where} is for another base model: its config names layer {beyond[-1]} and {base.name} has "
            f"{len(by_layer)} layers (0 to {max(by_layer)})"
        )
    named = {by_layer[layer] for layer in wanted}
    if missing := sorted(named - pairs.keys(), key=layer_of):
        raise UserError(
            f"{where}: the interventions of {len(missing)} of {len(named)} layers are missing, such as {missing[0]}; "
            "save the adapter again"
        )
    if extra := sorted(pairs.keys() - named, key=layer_of):
        raise UserError(
            f"{where}: it holds interventions of {len(extra)} layers that its config does not name, such as {extra[0]}; "
            "save the adapter again"
        )
