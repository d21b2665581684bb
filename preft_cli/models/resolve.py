"""From `model.base` to a folder on this machine: built-in alias, random shape, local folder, Hub id."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from preft_cli.errors import UserError
from preft_cli.models.base import BaseModel
from preft_cli.models.hub import hub_folder
from preft_cli.models.shapes import RANDOM_SHAPES, random_folder
from preft_cli.models.smollm2 import smollm2_folder

ALIASES: dict[str, Callable[[], Path]] = {"smollm2-135m": smollm2_folder}
RANDOM_PREFIX = "random:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve(name: str, root: Path | None = None) -> BaseModel:
    """The base model called `name`, made ready on this machine.

    `root` is the folder that a relative local path starts from (default: the current one). May unpack or download,
    which is reported on stderr.

    Raises:
        UserError: when there is no such model, or it cannot be fetched; with the nearest known name.
    """
    if name in ALIASES:
        return BaseModel(name, ALIASES[name]())
    if name.startswith(RANDOM_PREFIX):
        return BaseModel(name, random_folder(_known_shape(name.removeprefix(RANDOM_PREFIX))), random=True)
    folder = (root or Path()) / Path(name).expanduser()
    if folder.is_dir():
        return BaseModel(name, _checked_folder(folder.resolve()))
    if _HUB_ID.fullmatch(name):
        return BaseModel(name, _checked_folder(hub_folder(name, hint=_nearest(name))))
    raise UserError(
        f"model.base: {name!r} is neither a built-in name, nor a folder, nor a Hub id (owner/name).{_nearest(name)}"
    )


def _known_shape(shape: str) -> str:
    if shape in RANDOM_SHAPES:
        return shape
    near = get_close_matches(shape, RANDOM_SHAPES, n=1, cutoff=0.4)
    meant = f" Did you mean random:{near[0]}?" if near else ""
    raise UserError(f"model.base: unknown random shape {shape!r}; known: {', '.join(sorted(RANDOM_SHAPES))}.{meant}")


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise UserError(f"model.base: {folder} has no config.json; a model folder holds config, tokenizer and weights.")
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"model.base: {folder} has no *.safetensors weights. Pickled weights (.bin) are not loaded; convert them "
            "with Transformers' save_pretrained."
        )
    _check_config(folder / "config.json")
    return folder


def _check_config(path: Path) -> None:
    """Refuse JSON that is no model config: Transformers would go by the folder's name instead."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"model.base: {path} is not a model config: it is not valid JSON ({error}).") from error
    except OSError as error:
        raise UserError(f"model.base: cannot read {path}: {error.strerror}.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(
            f"model.base: {path} is not a model config: expected a JSON object with a model_type. Fetch or save the "
            "model again."
        )


def _nearest(name: str) -> str:
    known = [*ALIASES, *(RANDOM_PREFIX + shape for shape in RANDOM_SHAPES)]
    near = get_close_matches(name.rsplit("/", 1)[-1].lower(), known, n=1, cutoff=0.5)
    if near:
        return f" Did you mean {near[0]}?"
    return f" Built in: {', '.join(known)}."
