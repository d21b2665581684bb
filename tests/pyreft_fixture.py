"""What pyreft itself wrote and computed (`tests/fixtures/pyreft/make.py`), and ways to spoil a copy of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from preft_cli.models import BaseModel

FOLDER = Path(__file__).parent / "fixtures" / "pyreft"
BASE = BaseModel(str(FOLDER / "base"), FOLDER / "base")
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / "expected.json").read_text())
"""By kind of intervention: prompts, and pyreft's greedy completions and log-probabilities with interventions at the prompt's
positions (`prompt`) or at all (`all`)."""

FIRST, LAST = (f"intkey_layer_{layer}_comp_block_output_unit_pos_nunit_1#0.bin" for layer in (0, 2))


def copy(kind: str, to: Path) -> Path:
    """The folder that pyreft saved, in a place where a test may spoil it."""
    return Path(shutil.copytree(FOLDER / kind, to))


def edit(folder: Path, **changes: Any) -> None:
    """Change `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_entry(folder: Path, index: int, value: Any) -> None:
    """Change one entry of the first representation."""
    representations = json.loads((folder / "config.json").read_text())["representations"]
    representations[0][index] = value
    edit(folder, representations=representations)


def edit_tensors(folder: Path, change: Any, file: str = FIRST) -> None:
    """`change` gets the dictionary of one file's tensors and changes it, or gives back another."""
    tensors = torch.load(folder / file, weights_only=True)
    changed = change(tensors)
    torch.save(changed if isinstance(changed, dict | list) else tensors, folder / file)
