"""Which TRL this was tested with: what we override or rely on is not its public interface.

If it called other methods than ours, it would tokenise, sample or merge by itself, in silence.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

from preft_cli.errors import UserError

TESTED = {
    "_compute_loss": "80295546bbdbf6f711acce7f6e69b0100ab40aa8f23ed8052cc564ff024e3e40",
    "_generate": "2a27fdf8f5e6f3562508eec3efb9e9dade2e0bf810de5031cdfab429d0a048f2",
    "_generate_and_score_completions": "1fa48922792dcd5c72da155cfe99db477771a7c61cde15519fe8c86d0cdc0b65",
    "_generate_single_turn": "e0f02e4fc094cefdb306c6f04da26a2547c8b8225161a90e87a6803b21989b8e",
    "_get_per_token_logps_and_entropies": "ea73c3909275851d0cd664b1e7694905fdcd9c285e848ae923d7402234f2edce",
    "_prepare_inputs": "f824e7fb0714795697c9b4d574de1e139dd5f4404c2554e92cf1db7f60fa6c96",
    "_tokenize_prompts": "d2d27f7c9bfda85f1c3225785fa2f09466c428803be6afa8a6c46290f7171a15",
    "training_step": "9e18632f7dd8e8d8f0ebbdcc4431feb1a9e3c037a02cf8c3aec38aa68ee58814",
}
"""Methods of GRPOTrainer, and sha256 of their source in TRL 1.16."""


def check_trl() -> None:
    """Refuse a TRL whose GRPOTrainer is not the one that was tested.

    Raises:
        UserError: names the methods that differ.
    """
    if changed := sorted(name for name, digest in digests().items() if digest != TESTED[name]):
        raise UserError(
            f"TRL {metadata.version('trl')} has another GRPOTrainer than the one that was tested ({', '.join(changed)}): "
            "pip install 'trl==1.16.*'"
        )


def digests() -> dict[str, str]:
    """Of the methods as they are installed; empty for one that is gone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not know this vLLM, which it is not let near
        from trl import GRPOTrainer

    return {name: _digest(getattr(GRPOTrainer, name, None)) for name in TESTED}


def _digest(function: Callable[..., Any] | None) -> str:
    source = inspect.getsource(inspect.unwrap(function)) if function else ""
    return hashlib.sha256(source.encode()).hexdigest()
