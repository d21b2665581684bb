"""What pyreft does not write beside its weights, and where it is learned instead. No torch here.

Its `config.json` says nothing of positions, activation function and base model; a checkpoint of its trainer has no `config.json`
at all. Some of it is in the `args.json` of its example script `examples/loreft/train.py`; a person says the rest.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

from preft_cli.adapters.json_file import read_json
from preft_cli.adapters.layout import PYREFT_CHECKPOINT
from preft_cli.errors import UserError

Positions = Literal["prompt", "all"]
Intervention = Literal["direft", "nodireft"]

METHOD_AT: dict[Positions, str] = {"prompt": "direftp", "all": "direft"}


class Told(NamedTuple):
    """What the person who converts says."""

    positions: Positions | None = None
    """`--positions`"""
    intervention: Intervention | None = None
    """`--intervention`, for a folder without config.json."""


NOTHING = Told()


class Recorded(NamedTuple):
    """What pyreft's example script recorded; None: it did not."""

    position: str | None = None
    """Such as `f3+l3`: the first three and the last three prompt tokens."""
    base_model: str | None = None
    linear: bool = False
    """Whether it is known that there is no activation function."""


def read_recorded(folder: Path) -> Recorded:
    """`args.json` of the folder; for a checkpoint of pyreft's trainer, also that of the run it lies in.

    Raises:
        UserError: it names what cannot be served, or is no JSON object.
    """
    places = [folder, folder.parent] if folder.name == PYREFT_CHECKPOINT else [folder]
    path = next((place / "args.json" for place in places if (place / "args.json").is_file()), None)
    if path is None:
        return Recorded()
    args = read_json(path)
    act_fn = args.get("act_fn")
    if act_fn not in (None, "linear"):
        raise UserError(
            f"{folder}: it was trained with the activation function {act_fn!r} ({path.name}), and DiReFT is served without "
            "one; train it again with act_fn null"
        )
    if args.get("use_lora"):
        raise UserError(
            f"{folder}: it was trained together with a LoRA ({path.name}: use_lora), which is not in this folder, and "
            "would compute something else without it"
        )
    position, model = args.get("position"), args.get("model")
    return Recorded(
        position if isinstance(position, str) else None, model if isinstance(model, str) else None, "act_fn" in args
    )


def require_positions(folder: Path, told: Told, recorded: Recorded) -> Positions:
    """At which positions it is going to act.

    Raises:
        UserError: nobody has said so, or it was trained on prompt tokens and is to act on completions too.
    """
    if told.positions == "all" and recorded.position:
        raise UserError(
            f"{folder}: --positions all lets it act on completions, and it was trained at {in_words(recorded.position)} "
            "(args.json). Convert it with --positions prompt (all prompt tokens, as direftp), which changes what it computes too"
        )
    if told.positions is not None:
        return told.positions
    prompt = "--positions prompt (all prompt tokens, as direftp)"
    if recorded.position:
        raise UserError(
            f"{folder}: it was trained at {in_words(recorded.position)} (args.json), which is not served. To have it act on "
            f"the whole prompt, which changes what it computes, say so in preft convert: {prompt}"
        )
    raise UserError(
        f"{folder}: pyreft does not record at which positions it was trained. Say where it shall act, in preft convert: "
        f"{prompt} or --positions all (every token, as direft); other positions than those of its training change what it "
        "computes"
    )


def changes(positions: Positions, recorded: Recorded) -> str:
    """The warning that goes with `--positions`."""
    reach = {"prompt": "all prompt tokens and no others", "all": "all tokens"}[positions]
    if recorded.position:
        return (
            f"--positions {positions} changes what this adapter computes: it was trained at {in_words(recorded.position)} "
            f"and will now act on {reach}"
        )
    return (
        f"--positions {positions} changes what this adapter computes if it was trained at others, such as the first and last "
        f"few prompt tokens (pyreft does not record them): it will now act on {reach}"
    )


def in_words(position: str) -> str:
    """`f3+l3` -> `the first 3 and the last 3 prompt tokens (f3+l3)`; what is not of that form stays as it is."""
    parts = [re.fullmatch(r"([fl])(\d+)", part) for part in position.split("+")]
    said = [f"the {'first' if part[1] == 'f' else 'last'} {part[2]}" for part in parts if part]
    return f"{' and '.join(said)} prompt tokens ({position})" if len(said) == len(parts) else f"positions {position!r}"
