"""Which key somebody meant: misspelt, at the wrong level, with a hyphen, or by another tool's name."""

from __future__ import annotations

from difflib import get_close_matches
from types import NoneType
from typing import get_args, get_origin

from pydantic import BaseModel

ELSEWHERE = {
    "lora_rank": "adapter.rank",
    "lora_r": "adapter.rank",
    "r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target_modules": "adapter.target_modules",
    "lora_target": "adapter.target_modules",
    "model_name_or_path": "model.base",
    "model_name": "model.base",
    "base_model": "model.base",
    "lr": "train.learning_rate",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "per_device_train_batch_size": "train.batch_size",
    "micro_batch_size": "train.batch_size",
    "grad_accum_steps": "train.gradient_accumulation_steps",
    "max_seq_length": "train.max_length",
    "max_seq_len": "train.max_length",
    "cutoff_len": "train.max_length",
    "dataset": "train.file",
    "train_file": "train.file",
    "eval_file": "eval.file",
    "validation_file": "eval.file",
    "logging_steps": "train.log_every",
    "save_steps": "train.save_every",
    "per_device_eval_batch_size": "eval.batch_size",
    "max_loras": "serve.gpu_slots",
    "max_cpu_loras": "serve.host_pool",
    "host_adapters": "serve.host_pool",
    "tp": "serve.tensor_parallel_size",
    "dp": "serve.data_parallel_size",
}
"""Keys of trainers and servers that people come from, and what they are called here."""


def near_keys(root: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """The keys that the unknown key at `path` may stand for, best first; empty if nothing is near.

    A key of the same section is named alone (`rank`), any other by its full path (`adapter.rank`).
    """
    *above, name = path
    here = model_at(root, tuple(above))
    siblings = {_plain(key): key for key in here.model_fields} if here else {}
    elsewhere = _all_keys(root)
    if _plain(name) in siblings:
        return [siblings[_plain(name)]]
    if _plain(name) in elsewhere:
        return [_placed(key, above) for key in elsewhere[_plain(name)][:3]]
    if close := get_close_matches(_plain(name), siblings, n=1, cutoff=0.6):
        return [siblings[close[0]]]
    if close := get_close_matches(_plain(name), elsewhere, n=1, cutoff=0.75):
        return [_placed(key, above) for key in elsewhere[close[0]][:3]]
    return []


def _placed(path: str, above: list[str]) -> str:
    """`train` inside of another section would read like a key of that section."""
    return f"{path} at the top level" if above and "." not in path else path


def near_words(word: object, words: list[str]) -> str | None:
    """The allowed word that is nearest to a wrong one."""
    return next(iter(get_close_matches(str(word).lower(), words, n=1, cutoff=0.6)), None)


def model_at(root: type[BaseModel], path: tuple[str, ...]) -> type[BaseModel] | None:
    """The model of the section at `path`, or of the entries of a list, which a number names; None if no section stands there."""
    entries = False
    for name in path:
        if entries and name.isdigit():
            entries = False
            continue
        field = root.model_fields.get(name)
        section = _model_in(field.annotation) if field else None
        nested = section or (_model_of_entries(field.annotation) if field else None)
        if nested is None:
            return None
        root, entries = nested, section is None
    return root


def _all_keys(root: type[BaseModel]) -> dict[str, list[str]]:
    """Every known key, and other tools' names, to full paths."""
    found: dict[str, list[str]] = {}
    for path in _paths(root):
        found.setdefault(_plain(path.rpartition(".")[2]), []).append(path)
    for name, path in ELSEWHERE.items():
        found.setdefault(_plain(name), [path])
    return found


def _paths(model: type[BaseModel], above: str = "") -> list[str]:
    paths = []
    for name, field in model.model_fields.items():
        nested = _model_in(field.annotation)
        paths += [f"{above}{name}"] + (_paths(nested, f"{above}{name}.") if nested else [])
    return paths


def _model_in(annotation: object) -> type[BaseModel] | None:
    options = [option for option in (annotation, *get_args(annotation)) if option is not NoneType]
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def _model_of_entries(annotation: object) -> type[BaseModel] | None:
    lists = [option for option in (annotation, *get_args(annotation)) if get_origin(option) is list]
    return next((found for option in lists if (found := _model_in(get_args(option)[0]))), None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
