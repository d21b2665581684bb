"""The tensors of one pyreft intervention become a low-rank pair on the residual stream: `h + W2^T (W1 h + b)`.

Shapes: d is the hidden size, r the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from engine_patch.adapter import LowRankPair
from preft_cli.adapters.pyreft.place import REFUSED
from preft_cli.adapters.pyreft.told import Intervention
from preft_cli.errors import UserError

W1, BIAS = "learned_source.weight", "learned_source.bias"
ORIGINAL, BASE = "rotate_layer.parametrizations.weight.original", "rotate_layer.parametrizations.weight.0.base"
PROJECTION = "proj_layer.weight"

_NAMED = {"direft": (W1, BIAS, ORIGINAL, BASE), "nodireft": (W1, BIAS, PROJECTION)}
# pyvene's notes of sizes, and a bias that NoDiReFT never adds.
_IDLE = {"direft": {"embed_dim", "interchange_dim"}, "nodireft": {"embed_dim", "interchange_dim", "proj_layer.bias"}}


def to_pair(tensors: Mapping[str, torch.Tensor], kind: Intervention, where: Path) -> LowRankPair:
    """All in float32, which holds each of pyreft's types exactly.

    Args:
        tensors: `learned_source.weight` [r, d] and `.bias` [r]; for nodireft `proj_layer.weight` [r, d], for direft the
            orthogonal parametrisation of W2^T: original [d, r] and base [d, d].
        kind: the intervention.
        where: the file, for errors.

    Raises:
        UserError: other tensors than these, other shapes, or values that are not finite.
    """
    _check_names(tensors, kind, where)
    found = {name: tensors[name] for name in _NAMED[kind]}
    _check_shapes(found, where)
    for name, tensor in found.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise UserError(
                f"{where}: {name} holds values that are not finite numbers; the training diverged, use an earlier state"
            )
    w1, bias, *second = (tensor.detach().float() for tensor in found.values())
    w2_t = second[0].T if kind == "nodireft" else orthonormal(*second)
    return LowRankPair(w1.contiguous(), w2_t.contiguous(), 1.0, bias.contiguous())


def orthonormal(original: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The weight [d, r] that `torch.nn.utils.parametrizations.orthogonal` computes of `original` [d, r] and `base` [d, d].

    Householder reflections for r < d, the exponential of a skew matrix for r = d, as the default is there. Computed here
    since a parametrised module begins with a factorisation of [d, d] that the loaded tensors then replace.
    """
    if original.shape[0] == original.shape[1]:
        lower = original.tril()
        return torch.matmul(base, torch.linalg.matrix_exp(lower - lower.T))
    below = original.tril(-1)
    tau = 2.0 / (1.0 + (below * below).sum(-2))
    # The diagonal holds signs. What is less than 1 counts as 0, there as here.
    signs = original.diagonal().int()
    return torch.matmul(base, torch.linalg.householder_product(below, tau) * signs)


def dead_ranks(pair: LowRankPair) -> int:
    """How many ranks of W2 are zero, and hence do nothing."""
    return int((pair.b == 0).all(0).sum())


def _check_names(tensors: Mapping[str, torch.Tensor], kind: Intervention, where: Path) -> None:
    if "rotate_layer" in tensors:
        raise UserError(f"{where}: {REFUSED['LoreftIntervention']}")
    if missing := [name for name in _NAMED[kind] if name not in tensors]:
        held = ", ".join(sorted(tensors)) or "nothing"
        raise UserError(f"{where}: {missing[0]} is missing, which {kind} has (it holds {held}); save the adapter again")
    if foreign := sorted(tensors.keys() - {*_NAMED[kind]} - _IDLE[kind]):
        raise UserError(f"{where}: it holds {foreign[0]}, which {kind} has not; only DiReFT and NoDiReFT are served")


def _check_shapes(found: Mapping[str, torch.Tensor], where: Path) -> None:
    shape = list(found[W1].shape)
    rank, hidden = shape if len(shape) == 2 else (0, 0)
    expected = {
        W1: [rank, hidden],
        BIAS: [rank],
        PROJECTION: [rank, hidden],
        ORIGINAL: [hidden, rank],
        BASE: [hidden, hidden],
    }
    wrong = [name for name, tensor in found.items() if list(tensor.shape) != expected[name]]
    if wrong or not 0 < rank <= hidden:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in found.items())
        raise UserError(
            f"{where}: the shapes do not belong together ({shapes}); expected [rank, hidden] for {W1}, and the others to fit"
        )
