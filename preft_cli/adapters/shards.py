"""Weights that were saved in several files, with an index that says which tensor lies in which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from preft_cli.adapters.json_file import read_json
from preft_cli.errors import UserError

if TYPE_CHECKING:
    import torch


def load_sharded(index: Path, load: Callable[[Path], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All tensors that the JSON file `index` names; `load` reads one shard.

    Raises:
        UserError: an index that is no index, a shard that is missing or lies elsewhere, or tensors that differ from what
            the index says: half an adapter, or a mixture of two, must not be served.
    """
    tensors: dict[str, torch.Tensor] = {}
    for shard, named in _shards(index).items():
        path = _inside(index, shard)
        found = load(path)
        if missing := sorted(named - found.keys()):
            raise UserError(
                f"{path} lacks {len(missing)} of {len(named)} tensors that {index.name} names, such as {missing[0]}; "
                "copy or save the adapter again"
            )
        if extra := sorted(found.keys() - named):
            raise UserError(
                f"{path} holds {len(extra)} tensors that {index.name} does not name there, such as {extra[0]}; the files "
                "are not of one adapter: copy or save it again"
            )
        tensors |= found
    return tensors


def _shards(index: Path) -> dict[str, set[str]]:
    """The tensors' names by shard, in the order of the shards' names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"{index} has no weight_map from tensors to files; save the adapter again")
    if not weight_map:
        raise UserError(f"{index} names no tensors; save the adapter again")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        shards.setdefault(shard, set()).add(tensor)
    return dict(sorted(shards.items()))


def _inside(index: Path, shard: str) -> Path:
    """The path of a shard, which lies beside its index and nowhere else."""
    path = index.parent / shard
    if not shard or shard in (".", "..") or "\0" in shard or Path(shard).name != shard:
        raise UserError(
            f"{index} names the shard {shard!r}: shards lie beside their index and are named without a folder"
        )
    if path.is_symlink() and not path.resolve().is_relative_to(index.parent.resolve()):
        raise UserError(
            f"{path} is a symbolic link that leaves {index.parent} (to {path.resolve()}); copy the file instead (cp -L)"
        )
    if not path.is_file():
        raise UserError(f"{path} is missing, and {index.name} names it; copy the whole folder again")
    return path
