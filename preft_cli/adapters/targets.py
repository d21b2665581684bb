"""Which modules a PEFT config adapts, with which rank and scaling: PEFT's own matching rules, without PEFT."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

# The first numbered segment is the layer; a later one (an expert's number) is not.
_ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."


def targeted(config: Mapping[str, Any], modules: Iterable[str]) -> set[str]:
    """Those of the base model's linear `modules` that the config adapts.

    `all-linear`, a regular expression for the whole name, or a list of names and name endings; `exclude_modules`,
    `layers_to_transform` and `layers_pattern` are honoured.
    """
    return {module for module in modules if _is_targeted(config, module)}


def _is_targeted(config: Mapping[str, Any], module: str) -> bool:
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if excluded and _matches(excluded, module):
        return False
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or _matches(targets, module)
    if not targets or not _matches(targets, module):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or layers == [] or module in targets:
        return True
    return _layer(module, config.get("layers_pattern")) in ([layers] if isinstance(layers, int) else layers)


def _matches(patterns: str | Iterable[str], module: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == pattern or module.endswith(f".{pattern}") for pattern in patterns)


def _layer(module: str, patterns: str | list[str] | None) -> int | None:
    if not patterns:
        expressions = [_ANY_LAYER]
    else:
        names = [patterns] if isinstance(patterns, str) else patterns
        expressions = [rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\." for name in names]
    for expression in expressions:
        if match := re.match(expression, module):
            return int(match["idx"])
    return None


def pattern_key(patterns: Iterable[str], module: str) -> str | None:
    """The first key of a `rank_pattern` or `alpha_pattern` that matches the end of `module` from a dot on.

    Keys are regular expressions: `layers.1.self_attn.q_proj` does not match layer 10 or 11, as its `.1.` is spelled
    out up to the next dot; `^` anchors at the start of the name.
    """
    for key in patterns:
        if re.match(rf"(.*\.)?({key})$", module):
            return key
    return None


def rank_and_scaling(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Rank and factor of `B @ A` of one module: alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""
    rank: int = _by_pattern(config, "rank_pattern", module, config["r"])
    alpha: float = _by_pattern(config, "alpha_pattern", module, config["lora_alpha"])
    return rank, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _by_pattern(config: Mapping[str, Any], name: str, module: str, default: Any) -> Any:
    patterns = config.get(name) or {}
    key = pattern_key(patterns, module)
    return default if key is None else patterns[key]


def idle_patterns(config: Mapping[str, Any], modules: Iterable[str]) -> list[str]:
    """Pattern keys that match none of the adapted `modules`, hence do nothing: usually a typing mistake."""
    names = list(modules)
    return [
        f"{field} {key!r}"
        for field in ("rank_pattern", "alpha_pattern")
        for key in config.get(field) or {}
        if not any(pattern_key([key], name) for name in names)
    ]
