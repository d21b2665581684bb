"""Names that a person gave to files of a store."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from engine_patch.store import SUFFIX, adapter_name, scan_store
from preft_cli.errors import UserError


def pick(store: Path, names: Sequence[str]) -> dict[str, Path]:
    """The file of each of `names`, broken ones too. Only what the store's folder holds has a name: no path leaves it.

    Raises:
        UserError: names that the store does not have, with the nearest ones.
        PreftError: the folder cannot be read.
    """
    listing = scan_store(store)
    files = {name: Path(path) for name, path in listing.files.items()}
    files |= {adapter_name(path): path for path, _ in listing.rejected}
    unknown = [name for name in names if name not in files]
    if unknown:
        raise UserError("\n".join(_unknown(name, files, store) for name in unknown))
    return {name: files[name] for name in names}


def _unknown(name: str, files: dict[str, Path], store: Path) -> str:
    # Somebody may have given the file instead of the name.
    near = get_close_matches(name.rpartition("/")[2].removesuffix(SUFFIX), files, n=3, cutoff=0.6)
    meant = f"did you mean {' or '.join(near)}?" if near else "preft store ls lists them"
    return f"there is no adapter {name!r} in {store}; {meant}"
