"""An `Adapter` becomes a PEFT folder again, tensors bit for bit."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from engine_patch.adapter import Adapter
from engine_patch.rule import is_prefill_only, parts
from preft_cli.adapters.files import atomic_folder
from preft_cli.adapters.layout import PEFT_CONFIG, PEFT_WEIGHTS, PREFILL_CONFIG, PREFILL_WEIGHTS
from preft_cli.adapters.pairs import to_tensors
from preft_cli.adapters.peft_same import holds_nothing_else
from preft_cli.adapters.targets import rank_and_scaling
from preft_cli.errors import UserError
from preft_cli.methods import PARTS


def write_peft(folder: Path, adapter: Adapter) -> list[Path]:
    """Write `adapter` to `folder` in PEFT's form and return the files.

    An all-token adapter gives a stock PEFT folder. A prefill-only one gets the same content under other file names and
    `peft_type: LORAP`: stock loaders find nothing there, where they would else apply it to all tokens in silence.

    Raises:
        UserError: `folder` holds something else, such as another adapter, which would be lost; it cannot be written; or the
            adapter is more than LoRA.
    """
    if beyond := parts(adapter.method) - {"lora"}:
        titles = " and ".join(PARTS[name].title for name in sorted(beyond))
        raise UserError(
            f"--to peft: PEFT has no form for {titles}, and this is a {adapter.method} adapter; keep its folder, or "
            "convert it to a .preft file"
        )
    prefill_only = is_prefill_only(adapter.method)
    names = (PREFILL_CONFIG, PREFILL_WEIGHTS) if prefill_only else (PEFT_CONFIG, PEFT_WEIGHTS)
    if folder.exists():
        foreign = sorted(set(_names(folder)) - {PEFT_CONFIG, PEFT_WEIGHTS, PREFILL_CONFIG, PREFILL_WEIGHTS})
        if foreign:
            raise UserError(
                f"{folder} holds other files (such as {foreign[0]}); choose an empty or new folder for --out"
            )
        if not holds_nothing_else(folder, adapter):
            raise UserError(f"{folder} holds another adapter, which would be lost; choose another --out or delete it")
    config = {**peft_config(adapter), "peft_type": "LORAP" if prefill_only else "LORA"}
    with atomic_folder(folder) as temporary:
        (temporary / names[0]).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        try:
            save_file(to_tensors(adapter.pairs), temporary / names[1], metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, for one
            raise UserError(f"cannot write {folder / names[1]}: {error}; nothing was changed there") from error
    return [folder / name for name in names]


def _names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; choose a folder for --out")
    return [entry.name for entry in folder.iterdir()]


def peft_config(adapter: Adapter) -> dict[str, Any]:
    """The PEFT config of `adapter`: the recorded one where it describes the tensors, else one made from them."""
    recorded = adapter.meta.get("peft")
    base = {"base_model_name_or_path": adapter.meta.get("base_model"), "bias": "none", "task_type": "CAUSAL_LM"}
    config = {**base, "inference_mode": True, "init_lora_weights": True, "lora_dropout": 0.0}
    if isinstance(recorded, dict) and _describes(recorded, adapter):
        return {**config, **recorded}
    return {**config, **_from_tensors(adapter)}


def _describes(config: dict[str, Any], adapter: Adapter) -> bool:
    try:
        return all(rank_and_scaling(config, m) == (pair.rank, pair.scaling) for m, pair in adapter.pairs.items())
    except (KeyError, TypeError, ZeroDivisionError, re.error):
        return False


def _from_tensors(adapter: Adapter) -> dict[str, Any]:
    """Rank and alpha of most modules as the default, the others as anchored patterns."""
    kinds = {module: (pair.rank, _alpha(pair.scaling, pair.rank)) for module, pair in adapter.pairs.items()}
    rank, alpha = Counter(kinds.values()).most_common(1)[0][0]
    return {
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": False,
        "target_modules": sorted(kinds),
        "rank_pattern": {_exactly(m): r for m, (r, _) in sorted(kinds.items()) if r != rank},
        "alpha_pattern": {_exactly(m): a for m, (_, a) in sorted(kinds.items()) if a != alpha},
    }


def _exactly(module: str) -> str:
    return f"^{re.escape(module)}"


def _alpha(scaling: float, rank: int) -> float:
    """The alpha for which `alpha / rank` is `scaling` again, to the last bit where one exists."""
    alpha = scaling * rank
    candidates = (alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf))
    return next((c for c in candidates if c / rank == scaling), alpha)
