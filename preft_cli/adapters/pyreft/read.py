"""A pyreft folder becomes an `Adapter`: DiReFT and NoDiReFT interventions on the residual stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.errors import PreftError
from engine_patch.residual import block_of, stream_of
from engine_patch.rule import is_prefill_only
from preft_cli.adapters.base import BaseFacts, Loaded
from preft_cli.adapters.files import load_plain_bin, load_safetensors
from preft_cli.adapters.json_file import read_json
from preft_cli.adapters.layout import PYREFT_MODEL, PYREFT_MODEL_INDEXES, PYREFT_MODEL_SAFE
from preft_cli.adapters.pairs import check_against_base
from preft_cli.adapters.pyreft.config import read_places
from preft_cli.adapters.pyreft.place import Place
from preft_cli.adapters.pyreft.told import METHOD_AT, NOTHING, Recorded, Told, changes, read_recorded, require_positions
from preft_cli.adapters.pyreft.weights import dead_ranks, to_pair
from preft_cli.errors import UserError

_NO_TENSORS = 4096
"""Bytes that a file without any tensor stays below."""


def load_pyreft(folder: Path, base: BaseFacts, told: Told = NOTHING) -> Loaded:
    """Read `config.json` and each `intkey_*.bin` (plain tensors, nothing else) of `folder`.

    Raises:
        UserError: other interventions than DiReFT and NoDiReFT on decoder blocks, anything missing, damaged or for another
            base model, or a fact that pyreft does not record and nobody has told.
    """
    places, recorded = read_places(folder, told), read_recorded(folder)
    positions = require_positions(folder, told, recorded)
    base.require_streams(folder)
    _check_model(folder)
    # One file at a time: each holds a [d, d] matrix that is not kept.
    pairs: dict[str, LowRankPair] = {}
    for place in places:
        file = folder / place.file
        pairs[_stream(place, base, file)] = to_pair(load_plain_bin(file), place.kind, file)
    check_against_base(pairs, base.streams, base.name, folder)
    _check_alive(folder, pairs)
    notes = [changes(positions, recorded), *_notes(places, list(pairs.values()), recorded, base)]
    try:
        adapter = Adapter(METHOD_AT[positions], base.fingerprint, pairs, _meta(places, positions, recorded))
    except PreftError as error:
        raise UserError(f"{folder}: {error}") from error
    return Loaded(adapter, notes)


def told_of(adapter: Adapter) -> Told:
    """What was told when `adapter` was converted, for a second look at its source."""
    kept = adapter.meta.get("pyreft")
    kinds: list[Any] = kept.get("interventions", []) if isinstance(kept, dict) else []
    return Told("prompt" if is_prefill_only(adapter.method) else "all", kinds[0] if len(kinds) == 1 else None)


def _stream(place: Place, base: BaseFacts, file: Path) -> str:
    blocks = block_of(next(iter(base.streams))).rpartition(".")[0]
    if place.blocks is not None and place.blocks.replace(".", "_") != blocks.replace(".", "_"):
        raise UserError(f"{file} acts in {place.blocks}, and the decoder blocks of {base.name} are {blocks}")
    return stream_of(f"{blocks}.{place.layer}")


def _check_model(folder: Path) -> None:
    """pyreft's trainer writes the base model's trained parameters as well, most often none."""
    for name in (PYREFT_MODEL, PYREFT_MODEL_SAFE, *PYREFT_MODEL_INDEXES):
        if (folder / name).is_file() and _holds_tensors(folder / name):
            raise UserError(
                f"{folder}: {name} holds parameters of the base model that were trained with the interventions; adapters "
                "leave the base model as it is. Train again with the base model frozen"
            )


def _holds_tensors(path: Path) -> bool:
    if path.name in PYREFT_MODEL_INDEXES:
        return bool(read_json(path).get("weight_map"))
    # A file this large need not be read to know.
    if path.stat().st_size > _NO_TENSORS:
        return True
    return bool(load_safetensors(path) if path.name == PYREFT_MODEL_SAFE else load_plain_bin(path))


def _check_alive(folder: Path, pairs: dict[str, LowRankPair]) -> None:
    if all(dead_ranks(pair) == pair.rank for pair in pairs.values()):
        raise UserError(
            f"{folder}: its W2 is zero everywhere, so that it does nothing, in pyreft too. Weight decay does that to "
            "DireftIntervention: it moves the signs that its orthogonal parametrisation keeps; train again with weight_decay 0"
        )


def _notes(places: Sequence[Place], pairs: Sequence[LowRankPair], recorded: Recorded, base: BaseFacts) -> Iterator[str]:
    if not recorded.linear:
        yield (
            "pyreft does not record the activation function (act_fn); it is taken as linear, as pyreft's own loader does"
        )
    if recorded.base_model and Path(recorded.base_model).name != Path(base.name).name:
        yield f"it records the base model {recorded.base_model!r} and is converted for {base.name!r}; the shapes agree"
    for place, pair in zip(places, pairs, strict=True):
        if place.rank not in (None, pair.rank):
            yield f"layer {place.layer}: config.json says rank {place.rank}, the tensors have {pair.rank}, which counts"
        if dead := dead_ranks(pair):
            yield f"layer {place.layer}: {dead} of {pair.rank} ranks are zero and do nothing, in pyreft too (weight decay)"


def _meta(places: Sequence[Place], positions: str, recorded: Recorded) -> dict[str, Any]:
    kinds = sorted({place.kind for place in places})
    facts = {"interventions": kinds, "positions": positions}
    if recorded.position:
        facts["trained_at"] = recorded.position
    meta = {"source": "pyreft", "pyreft": facts}
    return {**meta, "base_model": recorded.base_model} if recorded.base_model else meta
