"""The trained adapter's folder: `preft_config.json` and `preft_adapter.safetensors`, tensors under PEFT's names.

Its file names are not PEFT's, so that no stock loader applies a prefill-only adapter to all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from safetensors.torch import save_file

from engine_patch.adapter import Adapter
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.store import check_name
from preft_cli import __version__
from preft_cli.adapters.base import BaseFacts, Loaded
from preft_cli.adapters.files import atomic_folder, load_safetensors
from preft_cli.adapters.layout import TRAINED_CONFIG, TRAINED_WEIGHTS
from preft_cli.adapters.pairs import check_against_base, check_complete, to_pairs, to_tensors
from preft_cli.adapters.targets import targeted
from preft_cli.adapters.trained_config import TrainedConfig, read_trained_config
from preft_cli.errors import UserError


def save_trained(
    folder: Path,
    adapter: Adapter,
    *,
    alpha: float,
    use_rslora: bool,
    target_modules: str | Sequence[str],
    name: str,
) -> None:
    """Write the folder aside and put it in place; one that is there is replaced.

    `adapter.meta` may carry `base_model` (the config's name of it) and `chat_template_digest`, which become fields of
    their own; the rest is kept as it is (JSON values).

    Raises:
        UserError: a name that no server could use, or pairs whose scaling is not what `alpha` and the rank give.
    """
    meta = dict(adapter.meta)
    try:
        config = TrainedConfig(
            preft_version=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            name=check_name(name),
            method=adapter.method,
            rank=adapter.rank,
            alpha=alpha,
            use_rslora=use_rslora,
            target_modules=target_modules if isinstance(target_modules, str) else sorted(target_modules),
            base_model=meta.pop("base_model", None),
            base=adapter.base.to_dict(),
            chat_template_digest=meta.pop("chat_template_digest", None),
            digest=adapter.digest(),
            meta=meta,
        )
    except PreftError as error:
        raise UserError(str(error)) from error
    for module, pair in adapter.pairs.items():
        if (pair.rank, pair.scaling) != (config.rank, config.scaling):
            raise UserError(
                f"{module} has rank {pair.rank} and scaling {pair.scaling}, but the adapter's settings give "
                f"{config.rank} and {config.scaling}"
            )
    with atomic_folder(folder) as temporary:
        save_file(to_tensors(adapter.pairs), temporary / TRAINED_WEIGHTS)
        (temporary / TRAINED_CONFIG).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")


def load_trained(folder: Path) -> Adapter:
    """Read a trained adapter and verify its digest; the base model is not looked at (see `load_trained_for`).

    Raises:
        UserError: anything missing, truncated, damaged or exchanged.
    """
    config = read_trained_config(folder)
    path = folder / TRAINED_WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder}: {TRAINED_WEIGHTS} is missing; train again, or copy the whole folder")
    pairs = to_pairs(load_safetensors(path), lambda module: (config.rank, config.scaling), path)
    try:
        adapter = Adapter(config.method, BaseFingerprint.from_dict(config.base), pairs, _meta(config))
    except PreftError as error:
        raise UserError(f"{path}: {error}") from error
    if adapter.digest() != config.digest:
        raise UserError(
            f"{path} is not what {TRAINED_CONFIG} beside it describes (content digest {adapter.digest()[:12]}, "
            f"expected {config.digest[:12]}): damaged or exchanged; copy the whole folder again"
        )
    return adapter


def load_trained_for(folder: Path, base: BaseFacts) -> Loaded:
    """`load_trained`, checked against the base model it is to serve.

    Raises:
        UserError: also when the adapter belongs to another base model or lacks modules.
    """
    adapter = load_trained(folder)
    path = folder / TRAINED_WEIGHTS
    recorded = read_trained_config(folder)
    check_against_base(adapter.pairs, base.shapes, base.name, path)
    if difference := adapter.base.mismatch(base.fingerprint):
        raise UserError(f"{folder} is for another base model ({recorded.base_model}): {difference}")
    check_complete(adapter.pairs, targeted({"target_modules": recorded.target_modules}, base.shapes), path)
    return Loaded(adapter, [])


def _meta(config: TrainedConfig) -> dict[str, object]:
    """The meta that was saved, and the PEFT config that the way back needs."""
    return {
        **config.meta,
        "source": "trained",
        "base_model": config.base_model,
        "chat_template_digest": config.chat_template_digest,
        "peft": {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": config.rank,
            # PEFT's own configs have whole numbers here, and some readers expect them.
            "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,
            "use_rslora": config.use_rslora,
            "target_modules": config.target_modules,
        },
    }
