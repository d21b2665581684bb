"""PEFT's `adapter_config.json`: what it says, and what in it cannot be served (refused by name, with the remedy)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from preft_cli.adapters.json_file import read_json
from preft_cli.errors import UserError

# These choose the first weights only; all others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) also change the base model's.
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})

# Names that a person can act on, where the config's own key says less.
PEFT_TYPES = {"IA3": "IA3", "LOHA": "LoHa", "LOKR": "LoKr", "ADALORA": "AdaLoRA", "VERA": "VeRA", "OFT": "OFT"}


class Unsupported(NamedTuple):
    """A feature that the formula `y += m * scaling * B A x` does not cover."""

    key: str
    feature: str
    remedy: str
    used: Callable[[Any], bool] = bool


UNSUPPORTED = (
    Unsupported("use_dora", "DoRA", "train it again with use_dora: false"),
    Unsupported(
        "modules_to_save",
        "modules_to_save (fully trained modules; with added tokens, the embeddings)",
        "train it again without modules_to_save and without adding tokens",
    ),
    Unsupported("bias", "trained bias", 'train it again with bias: "none"', lambda v: v not in (None, "none")),
    Unsupported("lora_bias", "lora_bias (a bias in lora_B)", "train it again with lora_bias: false"),
    Unsupported(
        "trainable_token_indices", "trained token embeddings", "train it again without trainable_token_indices"
    ),
    Unsupported("alora_invocation_tokens", "aLoRA (activated LoRA)", "train it again as plain LoRA"),
    Unsupported("layer_replication", "layer_replication", "train it again without replicated layers"),
    Unsupported("target_parameters", "LoRA on bare parameters", "train it again on linear layers (target_modules)"),
    Unsupported("use_qalora", "QALoRA", "train it again with use_qalora: false"),
    Unsupported("use_bdlora", "BD-LoRA (block-diagonal)", "train it again as plain LoRA"),
    Unsupported("arrow_config", "Arrow (a mixture of adapters)", "convert its single adapters"),
    Unsupported("kasa_config", "KaSA (it changes the base weights)", "train it again as plain LoRA"),
    Unsupported("monteclora_config", "MonteCLoRA", "train it again as plain LoRA"),
    Unsupported("fan_in_fan_out", "fan_in_fan_out (Conv1D layers)", "only torch.nn.Linear layers can be served"),
    Unsupported(
        "init_lora_weights",
        "an initialisation that changes the base model's weights (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA)",
        "save it with PEFT's path_initial_model_for_weight_conversion, which makes a plain LoRA of it",
        lambda v: isinstance(v, str) and v.lower() not in _PLAIN_INITS,
    ),
)


def read_config(path: Path) -> dict[str, Any]:
    """Read and check an `adapter_config.json`.

    Raises:
        UserError: not JSON, not LoRA, a feature that cannot be served, or values of a wrong kind.
    """
    config = read_json(path)
    peft_type = config.get("peft_type")
    if peft_type not in ("LORA", "LORAP"):
        kind = PEFT_TYPES.get(str(peft_type), peft_type)
        raise UserError(f"{path}: peft_type is {kind!r}; only LoRA can be converted: train it again as LoRA")
    for unsupported in UNSUPPORTED:
        value = config.get(unsupported.key)
        if unsupported.used(value):
            raise UserError(
                f"{path}: {unsupported.feature} cannot be served ({unsupported.key}: {_short(value)}); "
                f"{unsupported.remedy}"
            )
    _check_numbers(config, path)
    _check_targets(config, path)
    return config


def _check_numbers(config: Mapping[str, Any], path: Path) -> None:
    for key, whole in (("r", True), ("lora_alpha", False)):
        if key not in config:
            raise UserError(f"{path}: {key} is missing; save the adapter again with PEFT")
        _check_number(config[key], key, whole, path)
    for key, whole in (("rank_pattern", True), ("alpha_pattern", False)):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            raise UserError(f"{path}: {key} must map module names to numbers, found {_short(patterns)}")
        for pattern, value in patterns.items():
            _check_regex(pattern, key, path)
            _check_number(value, f"{key}.{pattern}", whole, path)


def _check_number(value: Any, key: str, whole: bool, path: Path) -> None:
    kinds = (int,) if whole else (int, float)
    # A rank of zero divides by zero; an alpha may be anything that a float can be, except NaN and infinity.
    if isinstance(value, bool) or not isinstance(value, kinds) or abs(value) == float("inf") or value != value:
        raise UserError(f"{path}: {key} must be a {'whole ' if whole else ''}number, found {_short(value)}")
    if whole and value < 1:
        raise UserError(f"{path}: {key} must be at least 1, found {value}")


def _check_targets(config: Mapping[str, Any], path: Path) -> None:
    for key in ("target_modules", "exclude_modules"):
        value = config.get(key)
        if isinstance(value, str):
            _check_regex(value, key, path)
        elif value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise UserError(f"{path}: {key} must be a list of module names or one pattern, found {_short(value)}")
    if not config.get("target_modules"):
        raise UserError(f"{path}: target_modules is missing or empty; save the adapter again with PEFT")


def _check_regex(pattern: str, key: str, path: Path) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{path}: {key}: {pattern!r} is not a regular expression ({error})") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
