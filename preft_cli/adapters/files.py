"""Folders that appear whole, and tensor files that cannot run code."""

from __future__ import annotations

import errno
import pickle
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from preft_cli.errors import UserError


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`; when the body ends well it takes the place of `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        if folder.exists():
            # A folder cannot replace a full one in one step: the old one steps aside, and comes back on failure.
            aside = temporary.with_suffix(".old")
            folder.rename(aside)
            try:
                temporary.rename(folder)
            except BaseException:
                aside.rename(folder)
                raise
            shutil.rmtree(aside)
        else:
            temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, on the CPU.

    Raises:
        UserError: missing, truncated or damaged.
    """
    try:
        tensors: dict[str, torch.Tensor] = load_file(path, device="cpu")
    except SafetensorError as error:
        size = path.stat().st_size
        raise UserError(
            f"{path} is truncated or damaged ({size} bytes; safetensors says: {error}); save the adapter again"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return tensors


def load_plain_bin(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a PyTorch `.bin` file; whatever else its pickle asks for is refused and never executed.

    Raises:
        UserError: a pickle that holds more than tensors, or a damaged file.
    """
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} is a pickle that holds more than plain tensors, or damaged; nothing in it was executed. "
            "Save the adapter as .safetensors"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        # EINVAL is what torch makes of a zip archive that lost its end: it looks for it before the beginning of the file.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        raise UserError(f"{path} is truncated or damaged; save the adapter again, best as .safetensors") from error
    if not isinstance(data, dict) or not all(_is_plain(value) for value in data.values()):
        raise UserError(f"{path} does not hold a plain dictionary of tensors; save the adapter as .safetensors")
    return {str(name): tensor for name, tensor in data.items()}


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"
