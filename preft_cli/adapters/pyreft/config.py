"""Which interventions a pyreft folder holds. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preft_cli.adapters.json_file import read_json
from preft_cli.adapters.layout import PYREFT_CHECKPOINT, PYREFT_CONFIG, PYREFT_PREFIX
from preft_cli.adapters.pyreft.place import Place, kind_of, layer_of, where, where_by_key
from preft_cli.adapters.pyreft.told import Told
from preft_cli.errors import UserError

# Of the entries of a representation, in pyvene's order: those that are looked at, and those that make something else of it.
_LAYER, _COMPONENT, _UNIT, _RANK = 0, 1, 2, 4
_EMPTY = {
    7: "subspace_partition",
    8: "group_key",
    10: "moe_key",
    11: "source_representation",
    12: "hidden_source_representation",
}
_KNOWN_ENTRIES = 14


def read_places(folder: Path, told: Told) -> list[Place]:
    """The interventions in `folder`, at most one behind each decoder block.

    Raises:
        UserError: one that cannot be served, a config that is damaged or does not fit the files, or no config and nobody who
            says what the interventions are.
    """
    present = sorted(path.name for path in folder.glob(f"{PYREFT_PREFIX}*"))
    if (folder / PYREFT_CONFIG).is_file():
        places = _from_config(folder, told)
        _check_files(folder, {place.file for place in places}, set(present))
    else:
        places = _from_names(folder, present, told)
    seen: dict[int, str] = {}
    for place in places:
        if place.layer in seen:
            raise UserError(
                f"{folder}: {seen[place.layer]} and {place.file} both act behind layer {place.layer}, as pyreft's first and "
                "last positions do when they share no weights; here, one intervention acts on all positions"
            )
        seen[place.layer] = place.file
    return places


def _check_files(folder: Path, named: set[str], present: set[str]) -> None:
    if missing := sorted(named - present):
        raise UserError(f"{folder}: {missing[0]} is missing; copy the whole folder, or save the adapter again")
    if extra := sorted(present - named):
        raise UserError(
            f"{folder}: {extra[0]} is not named in {PYREFT_CONFIG}; if it belongs to another adapter, remove it, else save "
            "the adapter again"
        )


def _from_config(folder: Path, told: Told) -> list[Place]:
    path = folder / PYREFT_CONFIG
    config = read_json(path)
    lists = [config.get(key) for key in ("intervention_types", "representations", "sorted_keys")]
    if not all(isinstance(one, list) and one for one in lists) or len({len(one) for one in lists if one}) != 1:
        raise UserError(
            f"{path} is not one that pyreft's save writes: intervention_types, representations and sorted_keys must be lists "
            "of one length; save the adapter again"
        )
    if config.get("mode", "parallel") != "parallel":
        raise UserError(f"{path}: the mode {config['mode']!r} is not served; interventions act in parallel")
    places = [_place(path, *entry) for entry in zip(*(one or () for one in lists), strict=True)]
    kinds = {place.kind for place in places}
    if told.intervention is not None and kinds != {told.intervention}:
        raise UserError(f"{path} says {' and '.join(sorted(kinds))}, and --intervention says {told.intervention}")
    return places


def _place(path: Path, of_type: Any, representation: Any, key: Any) -> Place:
    kind = kind_of(path, of_type)
    if not isinstance(representation, list) or len(representation) <= _RANK or not isinstance(key, str):
        raise UserError(f"{path}: {key!r}, {representation!r} are not of pyvene's form; save the adapter again")
    for index, value in enumerate(representation):
        if (index in _EMPTY or index >= _KNOWN_ENTRIES) and value is not None and value is not False:
            raise UserError(f"{path}: {_EMPTY.get(index, f'entry {index}')} {value!r} of {key} is not served")
    layer, blocks = where(path, representation[_LAYER], representation[_COMPONENT], representation[_UNIT])
    if layer_of(key) not in (None, layer):
        raise UserError(
            f"{path}: sorted_keys has {key!r} where representations has layer {layer}; save the adapter again"
        )
    if "/" in key or "\\" in key:
        raise UserError(f"{path}: the key {key!r} leaves the folder")
    rank = representation[_RANK]
    return Place(layer, blocks, kind, f"{PYREFT_PREFIX}{key}.bin", rank if isinstance(rank, int) else None)


def _from_names(folder: Path, names: Sequence[str], told: Told) -> list[Place]:
    """Without a config, names say where, and a person says what: the tensors of NoDiReFT have the names of NoReFT's."""
    if told.intervention is None:
        raise UserError(
            f"{folder}: {PYREFT_CONFIG} is missing, as in {PYREFT_CHECKPOINT} folders of pyreft's trainer; say what it holds: "
            "--intervention direft (DireftIntervention) or --intervention nodireft (NodireftIntervention); others are not served"
        )
    places = []
    for name in names:
        key = name.removeprefix(PYREFT_PREFIX).removesuffix(".bin")
        places.append(Place(*where_by_key(folder / name, key), told.intervention, name, None))
    return places
