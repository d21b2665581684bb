"""The trained adapter's folder: `preft_config.json` and `preft_adapter.safetensors`.

Its file names are not PEFT's, so that no stock loader applies a prefill-only adapter to all tokens. How tensors are called is
for each part of the method to say: LoRA's go by PEFT's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.store import check_name
from preft_cli import __version__
from preft_cli.adapters.base import BaseFacts, Loaded
from preft_cli.adapters.files import atomic_folder, load_safetensors
from preft_cli.adapters.layout import TRAINED_CONFIG, TRAINED_WEIGHTS
from preft_cli.adapters.names import explain_foreign
from preft_cli.adapters.pairs import check_fits
from preft_cli.adapters.trained_config import TrainedConfig, read_trained_config
from preft_cli.errors import UserError
from preft_cli.methods import PARTS, parts_of
from preft_cli.methods.base import Part, PartSettings
from preft_cli.methods.lorap.part import LoraSettings


def save_trained(folder: Path, adapter: Adapter, settings: Mapping[str, PartSettings], *, name: str) -> None:
    """Write the folder aside and put it in place; one that is there is replaced.

    `adapter.meta` may carry `base_model` (the config's name of it) and `chat_template_digest`, which become fields of
    their own; the rest is kept as it is (JSON values).

    Args:
        folder: to write.
        adapter: what it is to hold.
        settings: of each part of its method, by the part's name.
        name: on the server.

    Raises:
        UserError: a name that no server could use, or pairs of another rank or scaling than the settings give.
    """
    meta = dict(adapter.meta)
    try:
        config = TrainedConfig(
            preft_version=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            name=check_name(name),
            method=adapter.method,
            parts=dict(settings),
            base_model=meta.pop("base_model", None),
            base=adapter.base.to_dict(),
            chat_template_digest=meta.pop("chat_template_digest", None),
            digest=adapter.digest(),
            meta=meta,
        )
    except PreftError as error:
        raise UserError(str(error)) from error
    tensors: dict[str, Tensor] = {}
    for part in parts_of(adapter.method):
        tensors |= part.to_tensors(_checked(part, adapter, config.parts[part.name]))
    with atomic_folder(folder) as temporary:
        save_file(tensors, temporary / TRAINED_WEIGHTS)
        (temporary / TRAINED_CONFIG).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _checked(part: Part, adapter: Adapter, settings: PartSettings) -> dict[str, LowRankPair]:
    """The pairs of `part`, if they are what the settings say."""
    pairs = _held(part, adapter)
    for module, pair in pairs.items():
        if (pair.rank, pair.scaling) != (settings.rank, settings.scaling):
            raise UserError(
                f"{module} has rank {pair.rank} and scaling {pair.scaling}, but the adapter's settings give "
                f"{settings.rank} and {settings.scaling}"
            )
    return pairs


def load_trained(folder: Path) -> Adapter:
    """Read a trained adapter and verify its digest; the base model is not looked at (see `load_trained_for`).

    Raises:
        UserError: anything missing, truncated, damaged or exchanged.
    """
    config = read_trained_config(folder)
    path = folder / TRAINED_WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder}: {TRAINED_WEIGHTS} is missing; train again, or copy the whole folder")
    pairs: dict[str, LowRankPair] = {}
    for name, tensors in _by_part(load_safetensors(path), config, path).items():
        pairs |= PARTS[name].to_pairs(tensors, config.parts[name], path)
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


def _by_part(tensors: Mapping[str, Tensor], config: TrainedConfig, path: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors by the parts that they are of, each of which must have some."""
    found: dict[str, dict[str, Tensor]] = {part.name: {} for part in parts_of(config.method)}
    for name in sorted(tensors):
        owner = next((part for part in PARTS.values() if part.owns(name)), None)
        if owner is None:
            raise UserError(f"{path}: {explain_foreign(name)}")
        if owner.name not in found:
            raise UserError(
                f"{path}: tensor {name} is of {owner.title}, which a {config.method} adapter has not; copy the whole "
                "folder again"
            )
        found[owner.name][name] = tensors[name]
    for name, share in found.items():
        if not share:
            raise UserError(f"{path} holds no tensors of {PARTS[name].title}; copy the whole folder again")
    return found


def load_trained_for(folder: Path, base: BaseFacts) -> Loaded:
    """`load_trained`, checked against the base model it is to serve.

    Raises:
        UserError: also when the adapter belongs to another base model or lacks modules.
    """
    adapter = load_trained(folder)
    path = folder / TRAINED_WEIGHTS
    recorded = read_trained_config(folder)
    check_fits(adapter.pairs, base, path)
    if difference := adapter.base.mismatch(base.fingerprint):
        raise UserError(f"{folder} is for another base model ({recorded.base_model}): {difference}")
    for part in parts_of(adapter.method):
        part.check_complete(_held(part, adapter), recorded.parts[part.name], base, path)
    return Loaded(adapter, [])


def _held(part: Part, adapter: Adapter) -> dict[str, LowRankPair]:
    return {module: pair for module, pair in adapter.pairs.items() if part.holds(module)}


def _meta(config: TrainedConfig) -> dict[str, object]:
    """The meta that was saved and, where there is a LoRA part, the PEFT config that the way back needs."""
    lora = config.parts.get("lora")
    return {
        **config.meta,
        "source": "trained",
        "base_model": config.base_model,
        "chat_template_digest": config.chat_template_digest,
        **({"peft": lora.peft()} if isinstance(lora, LoraSettings) else {}),
    }
