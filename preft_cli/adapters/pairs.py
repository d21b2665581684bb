"""From named tensors to checked LoRA pairs, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from engine_patch.adapter import LowRankPair
from engine_patch.residual import is_stream
from preft_cli.adapters.base import BaseFacts
from preft_cli.adapters.names import LoraName, explain_foreign, parse, tensor_name
from preft_cli.errors import UserError

Shapes = Mapping[str, tuple[int, int]]
"""(in_features, out_features) by module name: where adapters can act in the base model."""


def to_pairs(
    tensors: Mapping[str, torch.Tensor], rank_and_scaling: Callable[[str], tuple[int, float]], where: Path
) -> dict[str, LowRankPair]:
    """Pair up lora_A [rank, in_features] and lora_B [out_features, rank] of each module.

    Raises:
        UserError: tensors of another kind, half a pair, one half twice, several adapters in one file, another rank than
            the config says, or values that are not finite. `where` names the file in errors.
    """
    halves: dict[str, dict[str, torch.Tensor]] = {}
    adapters = set()
    names: dict[LoraName, str] = {}
    for name in sorted(tensors):
        parsed = parse(name)
        if parsed is None:
            raise UserError(f"{where}: {explain_foreign(name)}")
        if (other := names.setdefault(parsed, name)) != name:
            raise UserError(
                f"{where}: {other} and {name} are both lora_{parsed.part} of {parsed.module}, and only one of them can "
                "be meant; save the adapter again"
            )
        adapters.add(parsed.adapter)
        halves.setdefault(parsed.module, {})[parsed.part] = tensors[name]
    if not halves:
        raise UserError(f"{where} holds no tensors; save the adapter again")
    if len(adapters) > 1:
        found = ", ".join(sorted(str(adapter or "(no name)") for adapter in adapters))
        raise UserError(f"{where} holds tensors of more than one adapter ({found}); save each in a folder of its own")
    return {module: _pair(module, parts, rank_and_scaling, where) for module, parts in halves.items()}


def _pair(
    module: str, parts: dict[str, torch.Tensor], rank_and_scaling: Callable[[str], tuple[int, float]], where: Path
) -> LowRankPair:
    for part in "AB":
        if part not in parts:
            raise UserError(f"{where}: tensor {tensor_name(module, part)} is missing; save the adapter again")
    a, b = parts["A"], parts["B"]
    rank, scaling = rank_and_scaling(module)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise UserError(
            f"{where}: {module} has lora_A of shape {list(a.shape)} and lora_B of shape {list(b.shape)}, "
            f"but its config says rank {rank}: [{rank}, in_features] and [out_features, {rank}]"
        )
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise UserError(f"{where}: {module} holds NaN or infinite values; the training diverged, use an earlier state")
    return LowRankPair(a, b, scaling)


def to_tensors(pairs: Mapping[str, LowRankPair]) -> dict[str, torch.Tensor]:
    """The pairs under PEFT's tensor names, contiguous, in their own dtype."""
    tensors = {}
    for module, pair in pairs.items():
        tensors[tensor_name(module, "A")] = pair.a.detach().cpu().contiguous()
        tensors[tensor_name(module, "B")] = pair.b.detach().cpu().contiguous()
    return tensors


def check_fits(pairs: Mapping[str, LowRankPair], base: BaseFacts, where: Path) -> None:
    """`check_against_base` for adapters that may hold interventions.

    Raises:
        UserError: also when the base model's residual streams are not known.
    """
    if any(map(is_stream, pairs)):
        base.require_streams(where)
    check_against_base(pairs, base.places, base.name, where)


def check_against_base(pairs: Mapping[str, LowRankPair], shapes: Shapes, base_name: str, where: Path) -> None:
    """Refuse an adapter whose tensors match no module of the base model, or do not fit it.

    Raises:
        UserError: with both values: layer numbers, or the features of a module.
    """
    unknown = [name for name in sorted(pairs) if name not in shapes]
    if unknown:
        layers, base_layers = layer_numbers(unknown), layer_numbers(shapes)
        if layers and base_layers and max(layers) > max(base_layers):
            raise UserError(
                f"{where} is for another base model: it adapts layer {max(layers)} and {base_name} "
                f"has {len(base_layers)} layers (0 to {max(base_layers)})"
            )
        raise UserError(
            f"{where}: {len(unknown)} of {len(pairs)} adapted modules do not exist in {base_name} or cannot be served, "
            f"such as {unknown[0]}; its modules are named like {next(iter(shapes), '(none)')}"
        )
    for name in sorted(pairs):
        pair, (in_features, out_features) = pairs[name], shapes[name]
        if (pair.in_features, pair.out_features) != (in_features, out_features):
            raise UserError(
                f"{where} is for another base model: {name} has {pair.in_features} inputs and {pair.out_features} "
                f"outputs in the adapter, {in_features} and {out_features} in {base_name}"
            )


def check_complete(pairs: Mapping[str, LowRankPair], expected: Iterable[str], where: Path) -> None:
    """Refuse an adapter that lacks modules which its config names, or has others.

    Raises:
        UserError: with the number and an example.
    """
    wanted = set(expected)
    missing, extra = sorted(wanted - pairs.keys()), sorted(pairs.keys() - wanted)
    if missing:
        found, need = layer_numbers(pairs), layer_numbers(wanted)
        layers = f" (layers {min(found)} to {max(found)} of {min(need)} to {max(need)})" if found < need else ""
        raise UserError(
            f"{where}: tensors of {len(missing)} of {len(wanted)} modules are missing, such as {missing[0]}{layers}; "
            "save the adapter again, or it is for another base model"
        )
    if extra:
        raise UserError(
            f"{where}: it holds tensors of {len(extra)} modules that its target_modules do not name, such as "
            f"{extra[0]}; PEFT would ignore them: correct target_modules or save the adapter again"
        )


def layer_numbers(modules: Iterable[str]) -> set[int]:
    """The decoder layers that occur in module names."""
    numbers = set()
    for module in modules:
        digits = next((part for part in module.split(".") if part.isdigit()), None)
        if digits is not None:
            numbers.add(int(digits))
    return numbers
