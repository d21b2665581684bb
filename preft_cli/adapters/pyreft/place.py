"""Where an intervention of pyreft acts and what it is, from what pyvene wrote about it. No torch here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from preft_cli.adapters.pyreft.told import Intervention
from preft_cli.errors import UserError

SERVED: dict[str, Intervention] = {"DireftIntervention": "direft", "NodireftIntervention": "nodireft"}
_ONLY = "only DiReFT and NoDiReFT, h + W2^T (W1 h + b), are served; train it again as one of them"
REFUSED = {
    "LoreftIntervention": f"LoReFT computes h + R^T (W h + b - R h); {_ONLY}",
    "NoreftIntervention": f"NoReFT computes h + W2^T (W1 h + b - W2 h); {_ONLY}",
    "ConsreftIntervention": f"ConsReFT computes h + R^T (b - R h); {_ONLY}",
    "LobireftIntervention": f"LobiReFT adds the same vector everywhere, h + R^T b; {_ONLY}",
}

_BLOCK = re.compile(r"(?P<blocks>.*?layers)\[(?P<layer>\d+)\][._]output")
# The name of a file between intkey_ and .bin; until pyvene 0.1.6, with a dot for each _ between the words.
_KEY = re.compile(
    r"(?:layer[._](?P<layer>\d+)[._])?comp[._](?P<component>.+)[._]unit[._](?P<unit>\w+?)[._]nunit[._]\d+#\d+"
)


class Place(NamedTuple):
    """One intervention."""

    layer: int
    blocks: str | None
    """Where the model's decoder blocks are, such as `model.layers`, if it is said; perhaps with _ for each dot."""
    kind: Intervention
    file: str
    rank: int | None
    """As configured."""


def kind_of(path: Path, of_type: Any) -> Intervention:
    """From `<class 'pyreft.interventions.DireftIntervention'>` in the config at `path`.

    Raises:
        UserError: another class, with what it computes if that is known.
    """
    found = re.fullmatch(r"<class '(?:(?P<module>[\w.]+)\.)?(?P<name>\w+)'>", str(of_type))
    name, module = (found["name"], found["module"] or "") if found else (str(of_type), "")
    if name in REFUSED:
        raise UserError(f"{path}: {REFUSED[name]}")
    if name not in SERVED or module.partition(".")[0] != "pyreft":
        # As written there: it need not even be the name of a class.
        raise UserError(f"{path}: interventions of the type {json.dumps(of_type)} are not known; {_ONLY}")
    return SERVED[name]


def where(path: Path, layer: Any, component: Any, unit: Any) -> tuple[int, str | None]:
    """The layer, and the name of the list of decoder blocks if the component says it.

    A component such as `model.layers[3].output` says the layer itself; the field beside it may be anything.

    Raises:
        UserError: anything but the output of a decoder block, at positions.
    """
    if unit != "pos":
        raise UserError(f"{path}: the unit {unit!r} is not served; DiReFT acts on positions (pos)")
    named = _BLOCK.fullmatch(str(component))
    if named is None:
        if component != "block_output" or isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise UserError(
                f"{path}: the component {component!r} (layer {layer!r}) is not served; DiReFT acts on what a decoder block "
                "gives out: block_output, or model.layers[N].output"
            )
        return layer, None
    if named["blocks"].startswith("base_model"):
        raise UserError(
            f"{path}: {component} is inside a PEFT model, so that it was trained together with a LoRA, which is not in "
            "this folder; it would compute something else without it"
        )
    return int(named["layer"]), named["blocks"]


def where_by_key(path: Path, key: str) -> tuple[int, str | None]:
    """`where`, from the name of the file at `path` alone; `key` is what stands between `intkey_` and `.bin`.

    Raises:
        UserError: also for a name of another form.
    """
    found = _KEY.fullmatch(key)
    if found is None:
        raise UserError(f"{path}: its name does not tell where it acts; copy its config.json beside it")
    component = "block_output" if found["component"] == "block.output" else found["component"]
    return where(path, int(found["layer"]) if found["layer"] else None, component, found["unit"])


def layer_of(key: str) -> int | None:
    """The layer that a key tells; None if it is of a form that is not known."""
    found = _KEY.fullmatch(key)
    digits = found and ((_BLOCK.fullmatch(found["component"]) or found)["layer"])
    return int(digits) if digits else None
