"""Whether a PEFT folder holds a given adapter already."""

from __future__ import annotations

from pathlib import Path

import torch

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.errors import PreftError
from preft_cli.adapters.files import load_safetensors
from preft_cli.adapters.layout import PEFT_CONFIG, PEFT_WEIGHTS, PREFILL_CONFIG, PREFILL_WEIGHTS
from preft_cli.adapters.pairs import to_pairs
from preft_cli.adapters.peft_config import read_config
from preft_cli.adapters.targets import rank_and_scaling
from preft_cli.errors import UserError

_FORMS = ((PEFT_CONFIG, PEFT_WEIGHTS), (PREFILL_CONFIG, PREFILL_WEIGHTS))


def holds_nothing_else(folder: Path, adapter: Adapter) -> bool:
    """Whether each adapter in `folder`, stock or prefill-only, has the modules, scalings and tensor bits of `adapter`.

    Files that cannot be read as an adapter count as another one: nobody can tell what would be lost with them.
    """
    present = [names for names in _FORMS if any((folder / name).exists() for name in names)]
    return all(_holds(folder / config, folder / weights, adapter) for config, weights in present)


def _holds(config_path: Path, weights: Path, adapter: Adapter) -> bool:
    try:
        config = read_config(config_path)
        pairs = to_pairs(load_safetensors(weights), lambda module: rank_and_scaling(config, module), weights)
    except (UserError, PreftError):
        return False
    return pairs.keys() == adapter.pairs.keys() and all(_equal(pairs[m], pair) for m, pair in adapter.pairs.items())


def _equal(one: LowRankPair, other: LowRankPair) -> bool:
    halves = ((one.a, other.a), (one.b, other.b))
    return one.scaling == other.scaling and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in halves)
